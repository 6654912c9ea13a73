#include <trireme/comm/named_order.h>

#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/shm/host_group.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace trireme {
namespace {

constexpr const char* kOrderArea = "horovod";
constexpr std::chrono::seconds kFarewell{1};
constexpr std::chrono::milliseconds kTick{1};

// --- messages ------------------------------------------------------------------------------------

void put(std::string& text, const std::string& value) {
  const auto size = static_cast<uint64_t>(value.size());
  text.append(reinterpret_cast<const char*>(&size), sizeof(size));
  text.append(value);
}

void put(std::string& text, int64_t value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Reads what put() has written. Throws c10::Error where the text ends too early.
class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  std::string words() {
    const auto size = static_cast<size_t>(number());
    return {take(size), size};
  }

 private:
  const char* take(size_t size) {
    TORCH_INTERNAL_ASSERT(size <= text_.size() - at_, "a message of named operations is cut");
    const char* start = text_.data() + at_;
    at_ += size;
    return start;
  }

  const std::string& text_;
  size_t at_ = 0;
};

void put(std::string& text, const NamedOperation& operation) {
  put(text, operation.name);
  put(text, operation.set);
  put(text, operation.kind);
  put(text, static_cast<int64_t>(operation.terms.size()));
  for (const auto& [name, value] : operation.terms) {
    put(text, name);
    put(text, value);
  }
  put(text, operation.payload);
  put(text, static_cast<int64_t>(operation.can_have_zeros));
}

NamedOperation read_operation(Reader& reader) {
  NamedOperation operation;
  operation.name = reader.words();
  operation.set = reader.number();
  operation.kind = reader.words();
  const int64_t terms = reader.number();
  for (int64_t i = 0; i < terms; ++i) {
    std::string name = reader.words();
    operation.terms.emplace_back(std::move(name), reader.words());
  }
  operation.payload = reader.words();
  operation.can_have_zeros = reader.number() != 0;
  return operation;
}

std::string message_of(const AgreedOperation& agreed) {
  std::string text;
  put(text, agreed.operation);
  put(text, static_cast<int64_t>(agreed.payloads.size()));
  for (const std::string& payload : agreed.payloads) put(text, payload);
  put(text, agreed.error);
  put(text, agreed.last_joined);
  return text;
}

AgreedOperation read_agreed(const std::string& text) {
  Reader reader(text);
  AgreedOperation agreed;
  agreed.operation = read_operation(reader);
  const int64_t payloads = reader.number();
  for (int64_t i = 0; i < payloads; ++i) agreed.payloads.push_back(reader.words());
  agreed.error = reader.words();
  agreed.last_joined = reader.number();
  return agreed;
}

std::string list_of_ranks(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace

// --- this rank -----------------------------------------------------------------------------------

NamedOrder::NamedOrder(std::shared_ptr<Communicator> communicator, NamedOrderOptions options)
    : where_(communicator->rank_of()),
      communicator_(std::move(communicator)),
      options_(options),
      box_(std::make_unique<MessageBox>(*communicator_)) {
  if (Host* host = communicator_->host()) options_.give_up_after = host->group().timeout();
  if (where_.rank == 0) book_ = std::make_unique<NameBook>(where_.world);
  thread_ = std::thread([this] { run(); });
}

NamedOrder::~NamedOrder() {
  close();
  wait_until_posted();
  stops_ = true;
  box_->wake();
  thread_.join();
}

void NamedOrder::announce(NamedOperation operation) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) C10_THROW_ERROR(DistBackendError, failure_);
    if (book_) {
      tell(book_->announce(where_.rank, std::move(operation), NameBook::Clock::now()));
    } else {
      std::string text;
      put(text, operation);
      post(0, std::move(text));
    }
    flush();
  }
  box_->wake();
}

void NamedOrder::define_set(int64_t set, std::vector<int64_t> ranks) {
  const std::lock_guard lock(mutex_);
  if (!book_) return;
  tell(book_->define_set(set, std::move(ranks)));
  flush();
}

std::optional<AgreedOperation> NamedOrder::next() {
  std::unique_lock lock(mutex_);
  came_.wait(lock, [this] {
    return !agreed_.empty() || !reports_.empty() || !failure_.empty() || closed_;
  });
  if (!reports_.empty()) {
    AgreedOperation report;
    report.operation.kind = kReport;
    report.error = std::move(reports_.front());
    reports_.pop_front();
    return report;
  }
  if (!agreed_.empty()) {
    AgreedOperation first = std::move(agreed_.front());
    agreed_.pop_front();
    return first;
  }
  if (closed_) return std::nullopt;
  C10_THROW_ERROR(DistBackendError, failure_);
}

void NamedOrder::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  came_.notify_all();
}

// What others are told with the last operation is on its way while this rank ends.
void NamedOrder::wait_until_posted() {
  const shm::Clock::time_point until = shm::Clock::now() + kFarewell;
  const auto is_done = [this] {
    const std::lock_guard lock(mutex_);
    return !failure_.empty() || (outbox_.empty() && box_->is_drained());
  };
  while (!is_done() && shm::Clock::now() < until) std::this_thread::sleep_for(kTick);
}

// --- its thread ----------------------------------------------------------------------------------

void NamedOrder::run() {
  try {
    shm::LookTimer timer;
    const auto is_over = [&] {
      timer.call_if_due(shm::Clock::now(), [this] { look(); });
      return stops_.load();
    };
    const auto step = [&] {
      return shm::found_after([this] { return poll(); }, [this] { return stops_.load(); });
    };
    shm::FutexWait(box_->futex(), shm::patience_of(where_.world)).until(step, is_over);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    end_with(what_of(error));
  }
}

// Returns whether anything was taken or posted.
bool NamedOrder::poll() {
  std::vector<MessageBox::Arrival> arrivals = box_->take_arrivals();
  const std::lock_guard lock(mutex_);
  for (const MessageBox::Arrival& arrival : arrivals) handle(arrival.from, arrival.message.text);
  return flush() || !arrivals.empty();
}

void NamedOrder::handle(int64_t from, const std::string& text) {
  if (!book_) {
    receive(read_agreed(text));
    return;
  }
  Reader reader(text);
  tell(book_->announce(from, read_operation(reader), NameBook::Clock::now()));
}

void NamedOrder::look() {
  const std::vector<int64_t> gone = box_->look();
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const int64_t rank : gone) {
    const std::string why = box_->why_gone(rank).value_or("it is gone");
    end_with(error_text(kOrderArea, "rank " + std::to_string(rank) + " is missing: " + why, where_,
                        "Look for the error of that rank; start the group again."));
  }
  if (book_) watch_waiting();
  flush();
}

// Says who lets others wait, once per operation, and gives up what waits for too long.
void NamedOrder::watch_waiting() {
  const NameBook::Clock::time_point now = NameBook::Clock::now();
  for (const NameBook::Waiting& one : book_->waiting()) {
    const auto waits = now - one.since;
    const std::string what = "issued by rank " + list_of_ranks(one.issued) + ", missing on rank " +
                             list_of_ranks(one.missing);
    const std::pair<int64_t, std::string> key{one.operation.set, one.operation.name};
    const auto known = std::find(reported_.begin(), reported_.end(), key);
    if (waits >= options_.report_after && known == reported_.end()) {
      reported_.push_back(key);
      reports_.push_back(one.operation.kind + " '" + one.operation.name + "': " + what);
      came_.notify_all();
    }
    if (waits >= options_.give_up_after) {
      if (known != reported_.end()) reported_.erase(known);
      tell(book_->give_up(one, "waited for too long: " + what));
    }
  }
}

// --- under the lock ------------------------------------------------------------------------------

void NamedOrder::tell(const std::vector<NameBook::Decision>& decisions) {
  for (const NameBook::Decision& decision : decisions) {
    for (const int64_t rank : decision.ranks) {
      if (rank == where_.rank)
        receive(decision.agreed);
      else
        post(rank, message_of(decision.agreed));
    }
  }
}

void NamedOrder::receive(AgreedOperation agreed) {
  agreed_.push_back(std::move(agreed));
  came_.notify_all();
}

void NamedOrder::post(int64_t to, std::string text) { outbox_.emplace_back(to, std::move(text)); }

// Posts what has room; returns whether any had. Messages to a rank stay in order.
bool NamedOrder::flush() {
  bool any = false;
  std::vector<int64_t> full;
  for (auto one = outbox_.begin(); one != outbox_.end();) {
    const bool waits = std::find(full.begin(), full.end(), one->first) != full.end();
    TensorMessage message;
    message.text = one->second;
    if (waits || box_->why_gone(one->first) || !box_->try_post(one->first, message, "a name")) {
      if (!waits) full.push_back(one->first);
      ++one;
    } else {
      one = outbox_.erase(one);
      any = true;
    }
  }
  return any;
}

void NamedOrder::end_with(const std::string& why) {
  if (failure_.empty()) failure_ = why;
  came_.notify_all();
}

}  // namespace trireme

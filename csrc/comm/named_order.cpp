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

// Entries of the log that no rank issues. The payload of a set is its ranks.
constexpr const char* kDefineSet = "define set";
constexpr const char* kFail = "fail";

std::string text_of_ranks(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) put(text, rank);
  return text;
}

std::vector<int64_t> read_ranks(const std::string& text) {
  Reader reader(text);
  std::vector<int64_t> ranks(text.size() / sizeof(int64_t));
  for (int64_t& rank : ranks) rank = reader.number();
  return ranks;
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
      patience_(shm::patience_of(where_.world)),
      log_(SharedLog::make(*communicator_)) {
  if (Host* host = communicator_->host()) options_.fail_after = host->group().timeout();
  if (log_ || where_.rank == 0) book_ = std::make_unique<NameBook>(where_.world);
  if (log_) return;
  box_ = std::make_unique<MessageBox>(*communicator_);
  thread_ = std::thread([this] { run(); });
}

NamedOrder::~NamedOrder() {
  close();
  wait_until_posted();
  if (log_) return;
  stops_ = true;
  box_->wake();
  thread_.join();
}

void NamedOrder::announce(const NamedOperation& operation) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) C10_THROW_ERROR(DistBackendError, failure_);
  if (log_) {
    if (operation.kind != NameBook::kBegun) in_flight_.emplace(operation.set, operation.name);
    show_reader();
    append(operation);
    return;
  }
  if (book_) {
    tell(book_->announce(where_.rank, operation, NameBook::Clock::now()));
  } else {
    std::string text;
    put(text, operation);
    post(0, std::move(text));
  }
  flush();
  box_->wake();
}

void NamedOrder::define_set(int64_t set, std::vector<int64_t> ranks) {
  if (where_.rank != 0) return;
  const std::lock_guard lock(mutex_);
  if (log_) {
    append({kDefineSet, set, kDefineSet, {}, text_of_ranks(ranks), false});
    return;
  }
  tell(book_->define_set(set, std::move(ranks)));
  flush();
}

bool NamedOrder::has_next() const {
  return (!agreed_.empty() && !has_turn_) || !reports_.empty() || !failure_.empty() || closed_;
}

AgreedOperation NamedOrder::take_first() {
  AgreedOperation first = std::move(agreed_.front());
  agreed_.pop_front();
  return first;
}

bool NamedOrder::wait_for_next() {
  if (log_) read_until_next();
  std::unique_lock lock(mutex_);
  if (!log_) came_.wait(lock, [this] { return has_next(); });
  return !closed_ || !agreed_.empty() || !reports_.empty();
}

void NamedOrder::read_until_next() {
  shm::LookTimer timer;
  const auto read = [&] {
    const std::lock_guard lock(mutex_);
    poll();
    return has_next();
  };
  const auto is_over = [&] {
    timer.call_if_due(shm::Clock::now(), [this] { look(); });
    return false;
  };
  shm::FutexWait(log_->futex_of(SharedLog::Reader::kBeside)).until(read, is_over);
}

std::optional<std::string> NamedOrder::take_report() {
  const std::lock_guard lock(mutex_);
  if (reports_.empty()) return std::nullopt;
  std::string report = std::move(reports_.front());
  reports_.pop_front();
  return report;
}

std::optional<AgreedOperation> NamedOrder::next() {
  const std::lock_guard lock(mutex_);
  if (!agreed_.empty()) return take_first();
  if (!closed_ && !failure_.empty()) C10_THROW_ERROR(DistBackendError, failure_);
  return std::nullopt;
}

void NamedOrder::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  wake_own();
}

// What others are told with the last operation is on its way while this rank ends.
void NamedOrder::wait_until_posted() {
  const shm::Clock::time_point until = shm::Clock::now() + kFarewell;
  const auto is_done = [this] {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return true;
    if (!log_) return outbox_.empty() && box_->is_drained();
    poll();
    return !log_->has_unposted();
  };
  while (!is_done() && shm::Clock::now() < until) std::this_thread::sleep_for(kTick);
}

// --- turns ---------------------------------------------------------------------------------------

bool NamedOrder::begin_turn() {
  if (!log_) return false;
  const std::lock_guard lock(mutex_);
  has_turn_ = true;
  show_reader();
  return true;
}

std::optional<AgreedOperation> NamedOrder::next_in_turn() {
  using Reader = SharedLog::Reader;
  const shm::Clock::time_point until = shm::Clock::now() + shm::kLookEvery;
  bool sleeps = false;
  const auto look = [&] {
    const std::lock_guard lock(mutex_);
    poll();
    return !agreed_.empty() || !failure_.empty() || closed_;
  };
  const auto is_over = [&] { return sleeps && shm::Clock::now() >= until; };
  const auto sleep = [&](uint32_t seen) {
    if (!sleeps) log_->set_reader(Reader::kWaiting);
    sleeps = true;
    if (!look()) shm::sleep_on(log_->futex_of(Reader::kWaiting), seen);
  };
  const shm::FutexWait wait(log_->futex_of(Reader::kWaiting), patience_);
  const bool has_come = shm::spin(shm::kLooksAwake, look) || wait.until(look, is_over, sleep);
  if (!has_come) this->look();
  const std::lock_guard lock(mutex_);
  if (sleeps) show_reader();
  if (!agreed_.empty()) return take_first();
  if (!closed_ && !failure_.empty()) C10_THROW_ERROR(DistBackendError, failure_);
  return std::nullopt;
}

void NamedOrder::end_turn() {
  const std::lock_guard lock(mutex_);
  has_turn_ = false;
  show_reader();
  poll();
  if (has_next()) wake_own();
}

// --- the thread that carries messages ------------------------------------------------------------

void NamedOrder::run() {
  try {
    shm::LookTimer timer;
    const auto is_over = [&] {
      timer.call_if_due(shm::Clock::now(), [this] { look(); });
      return stops_.load();
    };
    const auto step = [&] {
      const auto move = [this] {
        const std::lock_guard lock(mutex_);
        return poll();
      };
      return shm::found_after(move, [this] { return stops_.load(); });
    };
    shm::FutexWait(box_->futex(), patience_).until(step, is_over);
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex_);
    end_with(what_of(error));
  }
}

void NamedOrder::look() {
  std::vector<int64_t> gone;
  std::vector<std::string> why;
  if (box_) {
    gone = box_->look();
    for (const int64_t rank : gone) why.push_back(box_->why_gone(rank).value_or("it is gone"));
  }
  const std::lock_guard lock(mutex_);
  if (log_) {
    const std::vector<std::string> absent = absences();
    for (size_t rank = 0; rank < absent.size(); ++rank) {
      if (absent[rank].empty()) continue;
      gone.push_back(static_cast<int64_t>(rank));
      why.push_back(absent[rank]);
    }
  }
  poll();  // what they said before they went counts
  if (closed_) return;
  end_if_gone(gone, why);
  if (where_.rank == 0) watch_waiting();
  if (box_) flush();
}

// --- under the lock ------------------------------------------------------------------------------

// Returns whether anything was taken or posted.
bool NamedOrder::poll() {
  bool any = false;
  if (log_) {
    while (const auto entry = log_->take()) {
      take_in(entry->from, entry->text);
      any = true;
    }
    if (log_->has_unposted() && log_->post()) log_->wake_others(false);
    return any;
  }
  for (const MessageBox::Arrival& arrival : box_->take_arrivals()) {
    handle(arrival.from, arrival.message.text);
    any = true;
  }
  return flush() || any;
}

void NamedOrder::handle(int64_t from, const std::string& text) {
  if (!book_) {
    receive(read_agreed(text));
    return;
  }
  Reader reader(text);
  tell(book_->announce(from, read_operation(reader), NameBook::Clock::now()));
}

void NamedOrder::end_if_gone(const std::vector<int64_t>& ranks,
                             const std::vector<std::string>& why) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::string what = "rank " + std::to_string(ranks[i]) + " is missing: " + why[i];
    end_with(error_text(kOrderArea, what, where_,
                        "Look for the error of that rank; start the group again."));
  }
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
      wake_own();
    }
    if (waits >= options_.fail_after) {
      if (known != reported_.end()) reported_.erase(known);
      fail(one, "waited for too long: " + what);
    }
  }
}

void NamedOrder::fail(const NameBook::Waiting& waiting, const std::string& why) {
  if (log_) {
    append({waiting.operation.name, waiting.operation.set, kFail, {}, why, false});
  } else {
    tell(book_->fail(waiting, why));
  }
}

void NamedOrder::tell(const std::vector<NameBook::Decision>& decisions) {
  for (const NameBook::Decision& decision : decisions) {
    for (const int64_t rank : decision.ranks) {
      if (rank == where_.rank)
        receive(decision.agreed);
      else if (box_)
        post(rank, message_of(decision.agreed));
    }
  }
}

void NamedOrder::receive(AgreedOperation agreed) {
  const auto own = in_flight_.find({agreed.operation.set, agreed.operation.name});
  if (own != in_flight_.end()) in_flight_.erase(own);
  agreed_.push_back(std::move(agreed));
  if (has_next()) wake_own();
}

void NamedOrder::wake_own() {
  came_.notify_all();
  if (log_) log_->wake();
}

void NamedOrder::end_with(const std::string& why) {
  if (!failure_.empty()) return;
  failure_ = why;
  wake_own();
}

// --- by the log ----------------------------------------------------------------------------------

// Appends, and takes in what is there: perhaps this was the last word on something. Ranks that have
// nothing in flight hear at once of what concerns them all the same.
void NamedOrder::append(const NamedOperation& operation) {
  std::string text;
  put(text, operation);
  log_->append(text);
  log_->wake_others(operation.kind == NameBook::kJoin || operation.kind == NameBook::kBeginAgain);
  poll();
}

void NamedOrder::take_in(int64_t from, const std::string& text) {
  Reader reader(text);
  NamedOperation said = read_operation(reader);
  if (said.kind == kDefineSet) {
    tell(book_->define_set(said.set, read_ranks(said.payload)));
  } else if (said.kind == kFail) {
    fail_as_said(said);
  } else {
    tell(book_->announce(from, std::move(said), NameBook::Clock::now()));
  }
}

// Does nothing if the last rank has come before.
void NamedOrder::fail_as_said(const NamedOperation& said) {
  for (const NameBook::Waiting& one : book_->waiting())
    if (one.operation.set == said.set && one.operation.name == said.name)
      tell(book_->fail(one, said.payload));
}

// Shows others whom to wake: nobody, if a thread looks by itself or nothing is in flight.
void NamedOrder::show_reader() {
  using Reader = SharedLog::Reader;
  log_->set_reader(has_turn_ || in_flight_.empty() ? Reader::kNone : Reader::kBeside);
}

std::vector<std::string> NamedOrder::absences() const {
  std::vector<std::string> found;
  for (int64_t rank = 0; rank < where_.world; ++rank)
    found.push_back(rank == where_.rank ? "" : communicator_->host()->group().absence_of(rank));
  return found;
}

// --- by messages ---------------------------------------------------------------------------------

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

}  // namespace trireme

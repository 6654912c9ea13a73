#include <trireme/comm/backend/shm_backend_class.h>
#include <trireme/comm/backend/store_exchange.h>
#include <trireme/comm/c10d/gloo_group.h>
#include <trireme/comm/fault_board.h>
#include <trireme/comm/shm_tensors.h>
#include <trireme/common/duration.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <mutex>
#include <set>

namespace trireme {

using std::chrono::milliseconds;

namespace {

constexpr const char* kName = "trireme";

thread_local std::string current_label;

// All backends of this process. Never destroyed: groups may outlive static objects.
struct LivingBackends {
  std::mutex mutex;
  std::set<ShmBackend*> all;
};
LivingBackends& living_backends() {
  static auto* living = new LivingBackends;
  return *living;
}

// The key by which a rank counts how often it has made a group of this name.
std::string incarnation_key(int64_t rank) { return "incarnation/" + std::to_string(rank); }

// Returns the first line of an error, without the place in torch's source that its checks put
// before it.
std::string first_line(const std::exception& error) {
  std::string text = what_of(error);
  if (text.starts_with('[')) {
    const size_t end = text.find("] ");
    if (end != std::string::npos) text.erase(0, end + 2);
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, RankOf where,
                       const ShmOptions& options)
    : Backend(static_cast<int>(where.rank), static_cast<int>(where.world)),
      store_(store),
      where_(where),
      shm_options_(options),
      options_(c10::make_intrusive<Options>(kName, saturated(options.timeout))),
      queue_(where, [this](const std::string& reason) { return leave(reason); }) {
  meet();
  init();
  const std::lock_guard<std::mutex> lock(living_backends().mutex);
  living_backends().all.insert(this);
}

ShmBackend::~ShmBackend() {
  {
    const std::lock_guard<std::mutex> lock(living_backends().mutex);
    living_backends().all.erase(this);
  }
  try {
    shutdown();
  } catch (const std::exception& error) {  // a signal handler raised while this waited
    TORCH_WARN(first_line(error));
  }
  if (fork_guard_.in_child()) inner_.release();  // its threads stayed with the parent
}

// Finds out which ranks share memory.
void ShmBackend::meet() {
  // A Store may have carried an earlier group of the same name, whose keys nobody has removed.
  const int64_t incarnation = store_->add(incarnation_key(where_.rank), 1);
  const std::string number = std::to_string(incarnation);
  try {
    StoreExchange exchange(c10::make_intrusive<c10d::PrefixStore>("shm/" + number, store_),
                           shm_options_.connect_timeout);
    group_ =
        shm::HostGroup::join(exchange, {where_, shm_options_.timeout, shm_options_.host_partition});
  } catch (const shm::Fault& fault) {
    C10_THROW_ERROR(DistBackendError, fault.what());
  } catch (const c10::Error& error) {  // of the Store
    C10_THROW_ERROR(DistBackendError,
                    error_text("shm_backend", why_not_met(incarnation, error), where_,
                               "Look why those ranks are late or have failed, or raise the "
                               "timeout."));
  }
  if (group_->world() == where_.world) {
    collectives_ = std::make_unique<shm::Collectives>(*group_);
    p2p_ = std::make_unique<ShmP2p>(*group_, hooks_);
    return;
  }
  meet_hosts(number);
}

// Returns which ranks have not begun to make this group; if all have, or the Store no longer
// answers, what the Store said.
std::string ShmBackend::why_not_met(int64_t incarnation, const std::exception& error) const {
  std::string missing;
  try {
    for (int64_t rank = 0; rank < where_.world; ++rank) {
      if (store_->add(incarnation_key(rank), 0) < incarnation)
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(rank);
    }
  } catch (const std::exception&) {
    missing.clear();
  }
  if (missing.empty()) return "the ranks could not meet in the Store: " + first_line(error);
  return missing + " did not come to make the group within " +
         std::to_string(shm_options_.connect_timeout.count()) + " ms";
}

// Prepares memory inside the hosts, if any has more than one of the ranks, and Gloo between them.
void ShmBackend::meet_hosts(const std::string& incarnation) {
  const auto hosts = group_->hosts().size();
  const bool all_alone = hosts == static_cast<size_t>(where_.world);
  if (where_.rank == 0 && shm_options_.warns) {
    TORCH_WARN(error_text(
        "shm_backend",
        "ranks are on " + std::to_string(hosts) + " hosts (" + group_->why_alone() + "): " +
            (all_alone ? "Gloo between them" : "shared memory inside each, Gloo between them"),
        where_, "Nothing to do if that is so."));
  }
  const auto keys = [&](const char* what) {
    return c10::make_intrusive<c10d::PrefixStore>(what + incarnation, store_);
  };
  const GlooOptions options{.timeout = shm_options_.timeout,
                            .connect_timeout = shm_options_.connect_timeout,
                            .hostname = shm_options_.hostname};
  inner_ = make_gloo_backend(keys("gloo/"), where_, options);
  if (all_alone) {
    group_.reset();
  } else {
    hosts_ = std::make_unique<MultiHostCollectives>(*group_, keys("hosts/"), options);
  }
}

const std::string ShmBackend::getBackendName() const { return kName; }

void ShmBackend::setTimeout(milliseconds timeout) {
  options_->timeout = saturated(timeout);
  if (group_) group_->set_timeout(options_->timeout);
  if (inner_) inner_->setTimeout(options_->timeout);
}

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return uses_memory() ? sequence_.load() : inner_->getSequenceNumberForGroup();
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  if (place == ranks.end()) return nullptr;
  ShmOptions shm_options = shm_options_;
  shm_options.warns = false;
  shm_options.timeout = options ? options->timeout : options_->timeout;  // see setTimeout()
  if (shm_options.timeout != shm_options_.timeout)
    shm_options.connect_timeout = connect_timeout_of(shm_options.timeout);
  const RankOf where{place - ranks.begin(), static_cast<int64_t>(ranks.size())};
  return c10::make_intrusive<ShmBackend>(store, where, shm_options);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                     int flags,
                                                     const c10::intrusive_ptr<Options>& options) {
  std::vector<int> ranks;
  for (int rank = 0; rank < getSize(); ++rank) {
    const auto& gone = ranks_to_exclude;
    if (std::find(gone.begin(), gone.end(), rank) == gone.end()) ranks.push_back(rank);
  }
  TORCH_CHECK_VALUE(std::find(ranks.begin(), ranks.end(), getRank()) != ranks.end(),
                    error_text("shm_backend", "shrink got the rank that calls it", where_,
                               "Call it on the ranks that remain."));
  if ((flags & 1) != 0) this->abort();
  const std::string name = "shrink/" + std::to_string(++shrinks_);
  return split(c10::make_intrusive<c10d::PrefixStore>(name, store_), ranks, options);
}

void ShmBackend::abort() {
  if (inner_) inner_->abort();
  fail(error_text("shm_backend", "the group was aborted", where_,
                  "Destroy the process group and initialise it again."));
}

void ShmBackend::fail(const std::string& reason) noexcept {
  hooks_->aborting();
  if (hosts_) {
    hosts_->close(reason);
  } else if (group_) {
    group_->fail(reason);
  }
}

void ShmBackend::end_run(const std::string& error) noexcept {
  if (fork_guard_.in_child() || !group_) return;
  if (!error.empty() || queue_.is_idle()) group_->leave(error);
}

void ShmBackend::abandon(const std::string& reason) noexcept {
  group_->abandon(reason);
  queue_.note_told(group_->epoch());
  try {
    C10_THROW_ERROR(DistBackendError, reason);
  } catch (...) {
    queue_.cancel(std::current_exception());
  }
}

// Gives up an operation that a thread of this rank no longer waits for.
uint64_t ShmBackend::leave(const std::string& reason) {
  const std::string text =
      error_text("shm_backend", reason, where_, "Look for the error of that rank.");
  if (hosts_) {
    fail(text);
  } else {
    group_->abandon(text);
  }
  return group_->epoch();
}

void ShmBackend::run_alone(const char* title, Run run) {
  c10d::BarrierOptions options;
  options.asyncOp = false;
  submit({ShmArguments(title), c10d::OpType::UNKNOWN, title, {}, options}, std::move(run))->wait();
}

void ShmBackend::run_in_order(const char* title, Task task) {
  run_alone(title,
            [task = std::move(task)](Call& call) { task(call.run.one_host(), call.options); });
}

void ShmBackend::run_between_hosts(const char* title, HostsTask task) {
  run_alone(title, [task = std::move(task)](Call& call) { task(call.run.hosts(), call.options); });
}

ShmBackend::WorkPtr ShmBackend::all_gather_in_host(const TensorLists& parts) {
  const c10d::AllgatherOptions options;
  const ShmArguments arguments("all_gather");
  return submit({arguments, c10d::OpType::ALLGATHER, "trireme:all_gather_in_host", {}, options},
                [parts](Call& call) {
                  std::vector<shm::Pieces> pieces(parts.size());
                  for (size_t rank = 0; rank < parts.size(); ++rank) {
                    for (const at::Tensor& part : parts[rank]) {
                      TORCH_INTERNAL_ASSERT(part.is_contiguous());
                      pieces[rank].add({static_cast<std::byte*>(part.data_ptr()),
                                        static_cast<int64_t>(part.nbytes())});
                    }
                  }
                  call.run.hosts().all_gather_in_host(pieces, call.options);
                });
}

void ShmBackend::shutdown() {
  if (fork_guard_.in_child()) return;  // operations in flight are the parent's
  queue_.drain();
  if (p2p_) p2p_->close();
  if (inner_) inner_->shutdown();
}

ShmBackend::WorkPtr ShmBackend::submit(Request request, Run run) {
  const ShmArguments& arguments = request.arguments;
  if (fork_guard_.in_child()) {
    C10_THROW_ERROR(DistBackendError,
                    error_text("shm_backend",
                               std::string("got ") + arguments.name() +
                                   " in a forked child of the process that made the group",
                               where_, "Use the group in the parent only."));
  }
  const milliseconds timeout =
      request.timeout == c10d::kUnsetTimeout ? options_->timeout : saturated(request.timeout);
  auto work = c10::make_intrusive<ShmWork>(getRank(), request.type, request.title,
                                           std::move(request.outputs), ++sequence_);
  work->report_to(hooks_);
  queue_.submit(work, request.synchronous,
                [this, timeout, complaint = arguments.complaint(), name = arguments.name(),
                 label = current_label, list_hash = request.list_hash,
                 dtype = shm_dtype(arguments.dtype()), epoch = open_epoch(), run = std::move(run)] {
                  refuse_if_over(epoch);
                  Call call{hosts_ ? GroupCollectives(*hosts_) : GroupCollectives(*collectives_),
                            {.timeout = timeout, .label = label, .list_hash = list_hash},
                            dtype};
                  try {
                    if (!complaint.empty()) call.run.refuse(complaint, call.options);
                    run_or_refuse(call, name, run);
                  } catch (const shm::Fault& fault) {
                    hooks_->failed(fault);
                    if (fault.kind() == shm::FaultKind::kAbandoned)
                      queue_.note_untold(group_->epoch());
                    C10_THROW_ERROR(DistBackendError, fault.what());
                  } catch (const Interruption&) {  // the group has heard of it
                    queue_.note_untold(group_->epoch());
                    throw;
                  }
                });
  return work;
}

// Returns the epoch of the group to which an operation submitted now belongs; 0 if it begins the
// next one.
uint64_t ShmBackend::open_epoch() const {
  const uint64_t epoch = group_ && group_->has_memory() ? group_->epoch() : 0;
  return epoch > 0 && group_->has_abandoned() && queue_.is_told(epoch) ? 0 : epoch;
}

// Refuses a further step of abandoned work, which would else be taken for the first step of the
// work that follows.
void ShmBackend::refuse_if_over(uint64_t epoch) const {
  if (epoch > 0 && group_->epoch() == epoch && group_->has_abandoned())
    C10_THROW_ERROR(DistBackendError, group_->why_abandoned());
}

// A rank that fails before it has entered, for want of memory for a copy say, tells its peers,
// which would wait for it until their deadline; its own error stays the same.
void ShmBackend::run_or_refuse(Call& call, const char* name, const Run& run) {
  const uint64_t before = call.run.sequence();
  try {
    run(call);
  } catch (const shm::Fault&) {
    throw;
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception& error) {
    if (call.run.sequence() == before) {
      try {
        call.run.refuse(std::string(name) + ": " + first_line(error), call.options);
      } catch (const shm::Fault&) {  // it must throw
      }
    }
    throw;
  }
}

ShmBackend::ScopedLabel::ScopedLabel(std::string label) { current_label = std::move(label); }

ShmBackend::ScopedLabel::~ScopedLabel() { current_label.clear(); }

void leave_all_groups(const std::string& given) {
  const std::string error = one_line(given);
  const std::lock_guard<std::mutex> lock(living_backends().mutex);
  for (ShmBackend* backend : living_backends().all) backend->end_run(error);
  leave_all_boards(error);
}

c10::intrusive_ptr<c10d::Backend> make_shm_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                   RankOf where, const ShmOptions& options) {
  return c10::make_intrusive<ShmBackend>(store, where, options);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_shm_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                      RankOf where, const ShmOptions& options) {
  constexpr auto kCustom = c10d::ProcessGroup::BackendType::CUSTOM;
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, static_cast<int>(where.rank),
                                                       static_cast<int>(where.world));
  group->setBackend(c10::DeviceType::CPU, kCustom, make_shm_backend(store, where, options));
  group->setDefaultBackend(kCustom);
  return group;
}

}  // namespace trireme

#include <trireme/comm/gloo_group.h>
#include <trireme/comm/shm_backend_class.h>
#include <trireme/comm/shm_tensors.h>
#include <trireme/comm/store_exchange.h>
#include <trireme/common/forks.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace trireme {

using std::chrono::milliseconds;

namespace {

constexpr const char* kName = "trireme";

thread_local std::string current_label;

}  // namespace

ShmBackend::ShmBackend(const c10::intrusive_ptr<c10d::Store>& store, RankOf where,
                       const ShmOptions& options)
    : Backend(static_cast<int>(where.rank), static_cast<int>(where.world)),
      store_(store),
      where_(where),
      shm_options_(options),
      options_(c10::make_intrusive<Options>(kName, options.timeout)),
      forks_(forks_so_far()),
      queue_(where.world) {
  meet();
  init();
}

ShmBackend::~ShmBackend() { shutdown(); }

// Finds out which ranks share memory. Where not all do, Gloo serves the group.
void ShmBackend::meet() {
  // A Store may have carried an earlier group of the same name, whose keys nobody has removed.
  const int64_t incarnation = store_->add("incarnation/" + std::to_string(where_.rank), 1);
  const std::string number = std::to_string(incarnation);
  try {
    StoreExchange exchange(c10::make_intrusive<c10d::PrefixStore>("shm/" + number, store_),
                           shm_options_.connect_timeout);
    group_ =
        shm::HostGroup::join(exchange, {where_, shm_options_.timeout, shm_options_.host_partition});
  } catch (const shm::Fault& fault) {
    C10_THROW_ERROR(DistBackendError, fault.what());
  }
  if (group_->world() == where_.world) {
    collectives_ = std::make_unique<shm::Collectives>(*group_);
    p2p_ = std::make_unique<ShmP2p>(*group_);
    return;
  }
  if (where_.rank == 0) {
    TORCH_WARN(error_text("shm_backend",
                          "not all ranks share memory (" + group_->why_alone() +
                              "); the whole group uses Gloo over TCP",
                          where_, "Nothing to do if they run on several hosts."));
  }
  group_.reset();
  inner_ =
      make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo/" + number, store_), where_,
                        {.timeout = shm_options_.timeout,
                         .connect_timeout = shm_options_.connect_timeout,
                         .hostname = shm_options_.hostname});
}

const std::string ShmBackend::getBackendName() const { return kName; }

void ShmBackend::setTimeout(milliseconds timeout) {
  options_->timeout = timeout;
  if (inner_) inner_->setTimeout(timeout);
}

uint64_t ShmBackend::getSequenceNumberForGroup() {
  return inner_ ? inner_->getSequenceNumberForGroup() : sequence_.load();
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                    const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto place = std::find(ranks.begin(), ranks.end(), getRank());
  if (place == ranks.end()) return nullptr;
  ShmOptions shm_options = shm_options_;
  if (options) shm_options.timeout = options->timeout;
  const RankOf where{place - ranks.begin(), static_cast<int64_t>(ranks.size())};
  return c10::make_intrusive<ShmBackend>(store, where, shm_options);
}

void ShmBackend::abort() {
  if (inner_) return inner_->abort();
  fail(error_text("shm_backend", "the group was aborted", where_,
                  "Destroy the process group and initialise it again."));
}

void ShmBackend::fail(const std::string& reason) noexcept {
  if (group_) group_->fail(reason);
}

void ShmBackend::shutdown() {
  if (forks_ != forks_so_far()) return;  // what is in flight is the parent's
  if (inner_) return inner_->shutdown();
  queue_.drain();
  p2p_->close();
}

ShmBackend::WorkPtr ShmBackend::submit(Request request, Run run) {
  const ShmArguments& arguments = request.arguments;
  if (forks_ != forks_so_far()) {
    C10_THROW_ERROR(DistBackendError,
                    error_text("shm_backend",
                               std::string("got ") + arguments.name() +
                                   " in a forked child of the process that made the group",
                               where_, "Use the group in the parent only."));
  }
  const milliseconds timeout =
      request.timeout == c10d::kUnsetTimeout ? options_->timeout : request.timeout;
  auto work = c10::make_intrusive<ShmWork>(getRank(), request.type, request.title,
                                           std::move(request.outputs), ++sequence_);
  queue_.submit(work, request.synchronous,
                [this, timeout, complaint = arguments.complaint(), label = current_label,
                 dtype = shm_dtype(arguments.dtype()), run = std::move(run)] {
                  Call call{*collectives_, {.timeout = timeout, .label = label}, dtype};
                  try {
                    if (!complaint.empty()) collectives_->refuse(complaint, call.options);
                    run(call);
                  } catch (const shm::Fault& fault) {
                    C10_THROW_ERROR(DistBackendError, fault.what());
                  }
                });
  return work;
}

ShmBackend::ScopedLabel::ScopedLabel(std::string label) { current_label = std::move(label); }

ShmBackend::ScopedLabel::~ScopedLabel() { current_label.clear(); }

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

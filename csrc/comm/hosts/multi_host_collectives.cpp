#include <trireme/comm/hosts/multi_host_scope.h>
#include <trireme/common/duration.h>

#include <ATen/core/Tensor.h>

#include <cstring>
#include <thread>

namespace trireme {

using shm::CallOptions;
using shm::Fault;
using shm::FaultKind;
using shm::Operation;
using shm::Pieces;
using std::chrono::milliseconds;

namespace {

constexpr std::string_view kMultiHostArea = "multi_host";
// How long a rank whose leg has broken waits for the message of a rank that knows why.
constexpr milliseconds kWordComesWithin{1000};

}  // namespace

// The message of a host to the others when its ranks have met.
struct MultiHostCollectives::Header {
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;
  uint64_t refused = 0;  // whether ranks of that host disagree; `text` says about what
  std::array<char, 488> text{};

  void say(const std::string& words) {
    std::memcpy(text.data(), words.data(), std::min(words.size(), text.size() - 1));
  }
};

MultiHostCollectives::MultiHostCollectives(shm::HostGroup& group,
                                           const c10::intrusive_ptr<c10d::Store>& store,
                                           const GlooOptions& options)
    : group_(group), layout_(group.hosts(), group.where().rank), board_(store, group.where()) {
  if (group.world() > 1) local_ = std::make_unique<shm::Collectives>(group);
  if (layout_.has_leg()) {
    leg_ = std::make_unique<HostLeg>(store, layout_, options,
                                     [this] { return failure().has_value(); });
  }
}

// --- The meeting ---------------------------------------------------------------------------------

MultiHostCollectives::Scope::Scope(MultiHostCollectives& owner, const Operation& operation,
                                   const CallOptions& call)
    : owner_(owner), label_(operation.to_string()) {
  const milliseconds patience =
      saturated(call.timeout.count() > 0 ? call.timeout : owner.group_.timeout());
  deadline_ = deadline_after(patience);
  ++owner.sequence_;
  shm::Record record;
  record.write(owner.sequence_, operation);
  Header mine{.sequence = owner.sequence_, .fingerprint = record.fingerprint};
  mine.say(label_);
  std::optional<Fault> refused;
  try {
    owner.meet_on_host(operation, {.timeout = patience, .label = call.label});
  } catch (const Fault& fault) {
    if (fault.kind() != FaultKind::kMismatch) throw;
    refused = fault;
    mine.refused = 1;
    mine.text = {};
    mine.say(fault.what());
  }
  std::string complaint;
  if (owner.leg_) complaint = owner.compare_with_hosts(mine, deadline_ + kHostSpeaksFirst);
  if (refused) throw Fault(*refused);
  if (owner.local_ && owner.layout_.ranks_here() > owner.layout_.legs)  // some have no leg
    tell_host(complaint);
  if (complaint.empty()) return;
  throw Fault(FaultKind::kMismatch,
              error_text(kMultiHostArea, complaint, owner.group_.where(),
                         "Call the same collectives in the same order on every rank; nothing was "
                         "moved by this one."));
}

// Tells all ranks of this host, from the first one, the complaint that the legs have found.
void MultiHostCollectives::Scope::tell_host(std::string& complaint) const {
  std::array<char, sizeof(Header)> text{};
  std::memcpy(text.data(), complaint.data(), std::min(complaint.size(), text.size() - 1));
  broadcast({reinterpret_cast<std::byte*>(text.data()), sizeof(text)}, 0);
  complaint.assign(text.data());
}

void MultiHostCollectives::meet_on_host(const Operation& operation, const CallOptions& call) {
  if (operation.verb == shm::Verb::kRefused) {
    if (local_) local_->refuse(operation.label, call);
    throw Fault(FaultKind::kMismatch, error_text(kMultiHostArea, std::string(operation.label),
                                                 group_.where(), "Nothing was moved."));
  }
  if (local_) local_->meet(operation, call);
}

// Returns what this host and another do not agree about; empty if there is nothing.
std::string MultiHostCollectives::compare_with_hosts(const Header& mine,
                                                     shm::Clock::time_point deadline) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Header));
  std::vector<Header> theirs(static_cast<size_t>(layout_.count()));
  HostLeg::Flight flight(leg_.get());
  layout_.others([&](int64_t host) {
    leg_->send(flight, host, reinterpret_cast<const std::byte*>(&mine), kBytes);
    leg_->recv(flight, host, reinterpret_cast<std::byte*>(&theirs[static_cast<size_t>(host)]),
               kBytes);
  });
  leg_->land(flight, deadline);
  std::string complaint;
  layout_.others([&](int64_t host) {
    const Header& other = theirs[static_cast<size_t>(host)];
    const std::string said(other.text.data(), ::strnlen(other.text.data(), other.text.size()));
    const std::string who =
        "rank " + std::to_string(layout_.ranks_of(host).front()) + " on another host";
    if (!complaint.empty()) return;
    if (other.refused != 0) {
      complaint = who + " says: " + said;
    } else if (other.fingerprint != mine.fingerprint || other.sequence != mine.sequence) {
      complaint = who + " called " + said + ", collective " + std::to_string(other.sequence) +
                  "; this one called " + std::string(mine.text.data()) + ", collective " +
                  std::to_string(mine.sequence);
      if (other.sequence == mine.sequence && said == mine.text.data())
        complaint += ", of other shapes or with a label that differs later on";
    }
  });
  return complaint;
}

// --- What goes wrong -----------------------------------------------------------------------------

void MultiHostCollectives::run(const Operation& operation, const CallOptions& call,
                               const std::function<void(const Scope&)>& stages) {
  std::string why;
  try {
    check_usable();  // if not, this rank's leg may still be open
    stages(Scope(*this, operation, call));
    return;
  } catch (const Fault& fault) {
    if (fault.kind() == FaultKind::kMismatch || fault.kind() == FaultKind::kForked) throw;
    close(fault.what());
    throw;
  } catch (const LegBroken& broken) {
    why = broken.what();
  } catch (const std::exception& error) {  // no memory, say, with messages under way
    close(error_text(kMultiHostArea, operation.to_string() + ": " + error.what(), group_.where(),
                     "Look for the error of that rank; then start the group again."));
    throw;
  }
  const Fault fault = reason_for(why, operation.to_string());
  close(fault.what());
  throw fault;
}

void MultiHostCollectives::check_usable() {
  group_.check_usable();
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  if (!reason_.empty()) throw Fault(FaultKind::kAborted, reason_);
}

void MultiHostCollectives::close(const std::string& reason) noexcept {
  {
    const std::lock_guard<std::mutex> lock(reason_mutex_);
    if (reason_.empty()) reason_ = reason;
  }
  board_.announce(reason);
  group_.fail(reason);
  if (leg_) leg_->close();
}

std::optional<std::string> MultiHostCollectives::failure() {
  if (const auto failure = group_.failure()) return failure;
  const std::lock_guard<std::mutex> lock(reason_mutex_);
  return reason_.empty() ? std::nullopt : std::optional(reason_);
}

std::optional<Fault> MultiHostCollectives::word_of_this_host(const std::string& operation) {
  if (const auto failed = failure()) return Fault(FaultKind::kAborted, *failed);
  for (int64_t peer = 0; peer < group_.world(); ++peer) {
    if (peer == group_.rank()) continue;
    if (const std::string absence = group_.absence_of(peer); !absence.empty()) {
      return Fault(FaultKind::kPeerLost, error_text(kMultiHostArea, operation + ": " + absence,
                                                    group_.where(), group_.advice_on_absence()));
    }
  }
  return std::nullopt;
}

// Finds the reason for a broken leg: the rank at its other end may have closed it because of a
// third.
Fault MultiHostCollectives::reason_for(const std::string& broken, const std::string& operation) {
  const auto until = shm::Clock::now() + kWordComesWithin;
  do {
    if (const auto fault = word_of_this_host(operation)) return *fault;
    if (const auto word = board_.announced()) {
      return Fault(FaultKind::kAborted,
                   error_text(kMultiHostArea,
                              operation + ": the group has failed; another host says: " + *word,
                              group_.where(), "Make a new group, without the rank that failed."));
    }
    std::this_thread::sleep_for(milliseconds(20));
  } while (shm::Clock::now() < until);
  return Fault(FaultKind::kPeerLost,
               error_text(kMultiHostArea, operation + ": " + broken, group_.where(),
                          "Look for the error of that rank; then start the group again."));
}

// --- Stages on this host -------------------------------------------------------------------------

void MultiHostCollectives::Scope::reduce_scatter(const Pieces& output,
                                                 const std::vector<Pieces>& inputs,
                                                 const shm::ReduceOptions& how) const {
  if (owner_.local_) return owner_.local_->reduce_scatter(output, inputs, how, here());
  output.visit(0, output.bytes(), [&](std::byte* out, int64_t position, int64_t length) {
    inputs[0].visit(position, length, [&](const std::byte* in, int64_t offset, int64_t bytes) {
      const void* source = in;
      shm::reduce(out + offset, nullptr,
                  {.dtype = how.dtype,
                   .op = how.op,
                   .numel = bytes / shm::element_bytes(how.dtype),
                   .sources = {&source, 1},
                   .factors = &how.factor},
                  false);
    });
  });
}

void MultiHostCollectives::Scope::all_gather(const std::vector<Pieces>& outputs,
                                             const Pieces& input) const {
  if (owner_.local_) return owner_.local_->all_gather(outputs, input, shm::Dtype::kBytes, here());
  if (outputs[0].is_same(input)) return;
  outputs[0].visit(0, outputs[0].bytes(), [&](std::byte* out, int64_t position, int64_t length) {
    input.visit(position, length, [&](const std::byte* in, int64_t offset, int64_t bytes) {
      std::memmove(out + offset, in, static_cast<size_t>(bytes));
    });
  });
}

void MultiHostCollectives::Scope::broadcast(const Pieces& memory, int64_t root) const {
  if (owner_.local_) owner_.local_->broadcast(memory, root, shm::Dtype::kBytes, here());
}

void MultiHostCollectives::Scope::all_to_all(const std::vector<Pieces>& outputs,
                                             const std::vector<Pieces>& inputs) const {
  if (!owner_.local_) return all_gather(outputs, inputs[0]);
  owner_.local_->all_to_all(outputs, inputs, shm::Dtype::kBytes, here());
}

void MultiHostCollectives::Scope::barrier() const {
  if (owner_.local_) owner_.local_->barrier(here());
}

shm::SharedSegment MultiHostCollectives::Scope::share_segment(int64_t bytes) const {
  if (owner_.local_) return owner_.local_->share_segment(bytes, here());
  shm::SharedSegment alone;
  try {
    alone.segment = shm::Segment::create(shm::SegmentKind::kAnonymous, bytes);
  } catch (const Fault& fault) {
    alone.why_not = "rank " + std::to_string(owner_.group_.where().rank) + " says: " + fault.what();
  }
  return alone;
}

}  // namespace trireme

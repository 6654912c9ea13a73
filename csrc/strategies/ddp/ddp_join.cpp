#include <trireme/strategies/ddp/ddp_join.h>

namespace trireme {
namespace {

enum What : int64_t { kForward = 1, kBackward };
constexpr int64_t kSyncBuffers = 1;

}  // namespace

std::string DdpJoin::describe(const JoinCall& call) const {
  return std::string(call.what == kForward ? "a forward" : "a backward") +
         " of DistributedDataParallel";
}

void DdpJoin::enter_join(Join* join, const JoinOptions& options) {
  if (join != nullptr) refuse_meetings(module_, options, "ddp", ddp_.communicator()->rank_of());
  join_ = join;
  buffers_may_differ_ = true;
  if (join_ == nullptr) return ddp_.trigger().set_armed_callback(nullptr);
  ddp_.trigger().set_armed_callback([this] { join_->tell(*this, {kBackward}); });
}

void DdpJoin::before_forward(bool sync_buffers) {
  int64_t root = 0;
  if (join_ != nullptr) {
    const JoinCall all = join_->tell(*this, {kForward, sync_buffers ? kSyncBuffers : 0});
    sync_buffers = (all.flags & kSyncBuffers) != 0;
    root = join_->root();
  }
  if (sync_buffers) ddp_.sync_buffers(module_.buffers(), root);
}

void DdpJoin::follow(const JoinCall& call) {
  if (call.what == kBackward) return ddp_.reducer().shadow_backward();
  if ((call.flags & kSyncBuffers) != 0) ddp_.sync_buffers(module_.buffers(), join_->root());
}

}  // namespace trireme

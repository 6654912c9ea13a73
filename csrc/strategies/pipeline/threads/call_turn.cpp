#include <trireme/strategies/pipeline/threads/call_turn.h>

#include <trireme/common/error.h>

#include <string>

namespace trireme {

void CallTurn::take(const PipelineRunner* runner) {
  if (runner != nullptr) runner->expect_call();
  TORCH_CHECK(!turn_.is_own(),
              error_text("pipeline", "got a call from within another one of the same thread", {},
                         "Call the pipeline when that has returned."));
  if (!ranks_) {
    turn_.take();
  } else if (!turn_.try_take()) {
    const std::string text = error_text(
        "pipeline", "got a call during one of another thread, of a pipeline over ranks",
        ranks_->rank_of(),
        "Make all calls in one thread, or one after the other: their order is that of all ranks");
    ranks_->announce_failure(text);
    TORCH_CHECK(false, text);
  }
}

}  // namespace trireme

#pragma once

#include <trireme/common/export.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// The kind of action of a rank on one stage. The texts are torch's; R is ours.
enum class ActionKind : uint8_t {
  kBubble,            // "": an empty cell of a table, in which its rank is idle
  kForward,           // F
  kBackward,          // B: gradients of the inputs and of the weights
  kBackwardInput,     // I: gradients of the inputs
  kBackwardWeight,    // W: gradients of the weights
  kRecompute,         // R: the forward once more, for the backward that follows
  kOverlap,           // OVERLAP_F_B: several of the above, begun together
  kSendForward,       // SEND_F: outputs, to the next stage
  kRecvForward,       // RECV_F: posts the receive; F, which uses the message, waits for it
  kSendBackward,      // SEND_B: gradients of the inputs, to the stage before
  kRecvBackward,      // RECV_B
  kWaitSendForward,   // WAIT_SEND_F: until the peer has posted its receive
  kWaitSendBackward,  // WAIT_SEND_B
  kUnshard,           // UNSHARD: gathers all parameters of a stage
  kReshard,           // RESHARD: frees them
  kReduceGrad,        // REDUCE_GRAD: begins to average the gradients of a stage over its replicas
  kWaitReduceGrad,    // WAIT_REDUCE_GRAD
};
inline constexpr size_t kActionKinds = 17;

// One cell of a table, a plain value.
struct PipelineAction {
  int32_t stage = -1;  // -1: an overlap, or a bubble
  ActionKind kind = ActionKind::kBubble;
  int32_t micro_batch = -1;                      // -1 for a kind that has none
  std::vector<PipelineAction> sub_actions = {};  // what an overlap runs, in this order

  TRIREME_API bool operator==(const PipelineAction& other) const;
};

// The place of a cell in a table: row and column from 1 on; 0 outside of a table.
struct TableCell {
  size_t row = 0;
  size_t column = 0;
};

// Writes "2F0", "1UNSHARD", "3SEND_F1", "(0F7;3B2)OVERLAP_F_B", and nothing for a bubble.
TRIREME_API std::string to_string(const PipelineAction& action);
// Reads what to_string() writes, spaces around it left out. Throws ValueError, which names the
// cell, for anything else.
TRIREME_API PipelineAction parse_action(std::string_view text, TableCell cell = {});

TRIREME_API std::string_view kind_text(ActionKind kind);
// Returns "the forward of micro-batch 2 of stage 1" for a computing action, for messages.
TRIREME_API std::string in_words(const PipelineAction& action);
// Returns whether actions of this kind belong to a micro-batch.
TRIREME_API bool has_micro_batch(ActionKind kind);
// Returns whether this kind computes: F, B, I, W, R and overlaps of them.
TRIREME_API bool is_compute(ActionKind kind);
// Returns whether this kind sends, receives or waits for a send.
TRIREME_API bool is_message(ActionKind kind);

// Visits the parts of an overlap, one after the other, or the action itself.
template <typename Visit>
void for_each_part(const PipelineAction& action, Visit visit) {
  if (action.kind != ActionKind::kOverlap) {
    visit(action);
    return;
  }
  for (const PipelineAction& part : action.sub_actions) visit(part);
}

}  // namespace trireme

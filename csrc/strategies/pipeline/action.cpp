#include <trireme/strategies/pipeline/action.h>

#include <trireme/strategies/pipeline/refuse.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

namespace trireme {
namespace {

struct KindInfo {
  std::string_view text;
  bool has_micro_batch;
};

// Follows the order of the enumeration.
constexpr std::array<KindInfo, kActionKinds> kKindInfos{{{"", false},
                                                         {"F", true},
                                                         {"B", true},
                                                         {"I", true},
                                                         {"W", true},
                                                         {"R", true},
                                                         {"OVERLAP_F_B", false},
                                                         {"SEND_F", true},
                                                         {"RECV_F", true},
                                                         {"SEND_B", true},
                                                         {"RECV_B", true},
                                                         {"WAIT_SEND_F", true},
                                                         {"WAIT_SEND_B", true},
                                                         {"UNSHARD", false},
                                                         {"RESHARD", false},
                                                         {"REDUCE_GRAD", false},
                                                         {"WAIT_REDUCE_GRAD", false}}};

bool is_digit(char letter) { return '0' <= letter && letter <= '9'; }

std::string_view stripped(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// Takes a number from the front of a text; -1 where there is none, or one that 32 bits do not hold.
int32_t take_number(std::string_view& text) {
  int32_t number = 0;
  if (text.empty() || !is_digit(text.front())) return -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

// Returns the kind that stands at the front of a text; a bubble where there is none.
ActionKind take_kind(std::string_view& text) {
  const std::string_view word = text.substr(
      0, static_cast<size_t>(std::find_if(text.begin(), text.end(), is_digit) - text.begin()));
  text.remove_prefix(word.size());
  const auto found = std::find_if(kKindInfos.begin(), kKindInfos.end(),
                                  [&](const KindInfo& info) { return info.text == word; });
  if (found == kKindInfos.end()) return ActionKind::kBubble;
  return static_cast<ActionKind>(found - kKindInfos.begin());
}

// Reads one action that is no overlap. Returns false where the text is none.
bool parse_single(std::string_view text, PipelineAction& action) {
  action.stage = take_number(text);
  action.kind = take_kind(text);
  if (action.stage < 0 || action.kind == ActionKind::kBubble ||
      action.kind == ActionKind::kOverlap) {
    return false;
  }
  if (has_micro_batch(action.kind)) {
    action.micro_batch = take_number(text);
    if (action.micro_batch < 0) return false;
  }
  return text.empty();
}

bool parse_overlap(std::string_view text, PipelineAction& action) {
  const size_t close = text.find(')');
  if (close == std::string_view::npos ||
      text.substr(close + 1) != kind_text(ActionKind::kOverlap)) {
    return false;
  }
  action.kind = ActionKind::kOverlap;
  std::string_view rest = text.substr(1, close - 1);
  while (true) {
    const size_t end = rest.find(';');
    PipelineAction part;
    if (!parse_single(stripped(rest.substr(0, end)), part) || !is_compute(part.kind)) return false;
    action.sub_actions.push_back(part);
    if (end == std::string_view::npos) return true;
    rest.remove_prefix(end + 1);
  }
}

// Returns a text without characters that end a message or its line.
std::string shown(std::string_view text) {
  std::string made(text);
  std::replace_if(
      made.begin(), made.end(), [](char letter) { return 0 <= letter && letter < ' '; }, '?');
  return made;
}

}  // namespace

bool PipelineAction::operator==(const PipelineAction& other) const {
  return stage == other.stage && kind == other.kind && micro_batch == other.micro_batch &&
         sub_actions == other.sub_actions;
}

std::string in_words(const PipelineAction& action) {
  const auto what = [&]() -> const char* {
    switch (action.kind) {
      case ActionKind::kForward:
        return "forward";
      case ActionKind::kBackward:
        return "backward";
      case ActionKind::kBackwardInput:
        return "backward to the inputs";
      case ActionKind::kBackwardWeight:
        return "backward to the weights";
      case ActionKind::kRecompute:
        return "recomputation";
      default:
        return "action";
    }
  };
  return c10::str("the ", what(), " of micro-batch ", action.micro_batch, " of stage ",
                  action.stage);
}

std::string_view kind_text(ActionKind kind) { return kKindInfos[static_cast<size_t>(kind)].text; }

bool has_micro_batch(ActionKind kind) {
  return kKindInfos[static_cast<size_t>(kind)].has_micro_batch;
}

bool is_compute(ActionKind kind) {
  return ActionKind::kForward <= kind && kind <= ActionKind::kOverlap;
}

bool is_message(ActionKind kind) {
  return ActionKind::kSendForward <= kind && kind <= ActionKind::kWaitSendBackward;
}

std::string to_string(const PipelineAction& action) {
  std::string text;
  if (action.kind == ActionKind::kBubble) return text;
  if (action.kind == ActionKind::kOverlap) {
    for (const PipelineAction& part : action.sub_actions) {
      text.append(text.empty() ? "(" : ";").append(to_string(part));
    }
    text += ")";
  } else {
    text = std::to_string(action.stage);
  }
  text += kind_text(action.kind);
  if (action.micro_batch >= 0) text += std::to_string(action.micro_batch);
  return text;
}

PipelineAction parse_action(std::string_view text, TableCell cell) {
  const std::string_view inner = stripped(text);
  PipelineAction action;
  if (inner.empty()) return action;
  const bool is_overlap = inner.front() == '(';
  if (is_overlap ? parse_overlap(inner, action) : parse_single(inner, action)) return action;
  std::string got = "got '" + shown(inner) + "'";
  if (cell.row > 0) {
    got += " in row " + std::to_string(cell.row) + ", column " + std::to_string(cell.column);
  }
  refuse_pipeline(got + ", expected a stage, a kind and a micro-batch",
                  "Write it as 2F0, 1UNSHARD, 3SEND_F1 or (0F7;3B2)OVERLAP_F_B.");
}

}  // namespace trireme

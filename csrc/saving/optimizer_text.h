#pragma once

#include <trireme/common/error.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// A rank's text under kOptimizerText, in the form of [Note: the state of an optimizer in a
// checkpoint] in optimizer_state.h.
struct TextOfRank {
  int64_t rank = 0;
  std::string text = {};
};

// Returns one text with the states of all texts, and with groups that have the parameters of all.
// If ranks differ about a value, the first text's stays. Throws ValueError if ranks that step
// different parameters have different groups or hyperparameters, and JsonTextError for a text that
// is no JSON object.
std::string merge_optimizer_texts(const std::vector<TextOfRank>& texts, RankOf where);

}  // namespace trireme

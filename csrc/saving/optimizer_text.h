#pragma once

#include <trireme/common/error.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// Is what a rank says under kOptimizerText, in the form of [Note: the state of an optimizer in a
// checkpoint] in optimizer_state.h.
struct TextOfRank {
  int64_t rank = 0;
  std::string text = {};
};

// Returns one text that says what all of them say: states of all, and groups that have the
// parameters of all. Where several ranks say the same thing differently the lowest is right. Throws
// ValueError where ranks that step other parameters have other groups or hyperparameters, and
// JsonTextError for what is no JSON object.
std::string merge_optimizer_texts(const std::vector<TextOfRank>& texts, RankOf where);

}  // namespace trireme

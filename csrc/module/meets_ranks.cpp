#include <trireme/module/meets_ranks.h>

namespace trireme {

std::string meeting_of_ranks(const torch::nn::Module& module, int64_t most) {
  for (const auto& item : module.named_modules()) {
    const auto* meeting = dynamic_cast<const MeetsRanks*>(item.value().get());
    if (meeting == nullptr || !item.value()->is_training() || meeting->ranks_that_meet() <= most)
      continue;
    const std::string& name = item.value()->name();
    return name.substr(name.rfind(':') + 1) + " at '" + item.key() + "'";
  }
  return "";
}

}  // namespace trireme

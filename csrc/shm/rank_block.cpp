#include <trireme/shm/rank_block.h>

#include <cstring>

namespace trireme::shm {

std::string round_text(const RankBlock& block, uint64_t entered) {
  const uint64_t round = block.rounds.load(std::memory_order_acquire);
  const Record& record = block.deposits[round % block.deposits.size()];
  if (round == 0 || record.sequence < entered) return {};
  const auto& name = block.names[block.named.load(std::memory_order_acquire) % block.names.size()];
  const size_t length = ::strnlen(name.data(), name.size());
  const std::string what = length == 0
                               ? record.operation().to_string()
                               : "the gradient of '" + std::string(name.data(), length) + "'";
  return "round " + std::to_string(round) + " of deposits, " + what;
}

}  // namespace trireme::shm

#include <trireme/shm/rank_block.h>

#include <cstring>

namespace trireme::shm {

std::string round_text(const RankProgress& progress, uint64_t entered) {
  const uint64_t round = progress.rounds.load(std::memory_order_acquire);
  const Record& record = progress.deposits[round % progress.deposits.size()];
  if (round == 0 || record.sequence < entered) return {};
  const auto& name =
      progress.names[progress.named.load(std::memory_order_acquire) % progress.names.size()];
  const size_t length = ::strnlen(name.data(), name.size());
  const std::string what = length == 0
                               ? record.operation().to_string()
                               : "the gradient of '" + std::string(name.data(), length) + "'";
  return "round " + std::to_string(round) + " of deposits, " + what;
}

}  // namespace trireme::shm

#include <trireme/comm/subgroups.h>

#include <trireme/comm/group_health.h>
#include <trireme/common/error.h>

#include <c10/util/Exception.h>

namespace trireme {
namespace {

// Ranks first, first + step, ...
struct Members {
  int64_t first = 0;
  int64_t count = 0;
  int64_t step = 1;
};

std::shared_ptr<Communicator> split(Communicator& communicator, const Members& members,
                                    const std::string& name) {
  std::vector<int> ranks;
  for (int64_t i = 0; i < members.count; ++i)
    ranks.push_back(static_cast<int>(members.first + i * members.step));
  return communicator.split(ranks, name);
}

void check_factor(RankOf where, int64_t count) {
  TORCH_CHECK_VALUE(count >= 1 && where.world % count == 0,
                    error_text("comm", "got groups of " + std::to_string(count) + " ranks", where,
                               "Pass a factor of " + std::to_string(where.world) + "."));
}

}  // namespace

std::shared_ptr<Communicator> duplicate(Communicator& communicator) {
  return split(communicator, {0, communicator.world(), 1}, "twin");
}

std::shared_ptr<Communicator> split_contiguous(Communicator& communicator, int64_t count) {
  const RankOf where = communicator.rank_of();
  check_factor(where, count);
  return split(communicator, {where.rank / count * count, count, 1},
               "neighbours/" + std::to_string(count));
}

std::shared_ptr<Communicator> split_strided(Communicator& communicator, int64_t count) {
  const RankOf where = communicator.rank_of();
  check_factor(where, count);
  return split(communicator, {where.rank % count, where.world / count, count},
               "counterparts/" + std::to_string(count));
}

void share_steps(const Communicator& communicator, const Communicator& other) {
  const auto from = communicator.health();
  const auto to = other.health();
  if (from && to) to->board.share_steps(from->board);
}

}  // namespace trireme

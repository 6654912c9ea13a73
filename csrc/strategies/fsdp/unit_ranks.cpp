#include <trireme/strategies/fsdp/unit_ranks.h>

#include <trireme/comm/subgroups.h>
#include <trireme/common/error.h>
#include <trireme/grad/plan_agreement.h>
#include <trireme/param/param_group.h>
#include <trireme/strategies/fsdp/sharded_module.h>

#include <c10/util/Exception.h>

#include <string>

namespace trireme {
namespace {

// Finds the ranks that share the parameters, and those that have the same shards.
UnitRanks sharing_of(const FsdpOptions& options) {
  Communicator& all = *options.communicator;
  const int64_t among = options.shard_among;
  if (among == 0 || among == all.world()) return {options.communicator, nullptr, nullptr};
  UnitRanks ranks{split_contiguous(all, among), split_strided(all, among), nullptr};
  TORCH_CHECK_NOT_IMPLEMENTED(
      ranks.sharers,
      error_text("fully_shard", "got a communicator that cannot make one of some of its ranks",
                 all.rank_of(), "Leave FsdpOptions::shard_among out."));
  return ranks;
}

void check_resharding(const FsdpOptions& options, RankOf where) {
  const int64_t among = options.reshard_among;
  const bool fits = among >= 0 && (among == 0 || where.world % among == 0);
  TORCH_CHECK_VALUE(fits,
                    error_text("fully_shard", "got reshard_among=" + std::to_string(among), where,
                               "Pass a factor of " + std::to_string(where.world) + "."));
  const bool is_said_once = among == 0 ? !options.reshards_with : !options.reshard_after_forward;
  const bool are_as_many = !options.reshards_with || options.reshards_with->world() == among;
  TORCH_CHECK_VALUE(
      is_said_once && are_as_many,
      error_text("fully_shard", "got options of resharding that contradict each other", where,
                 "Pass reshard_after_forward, or reshard_among with, if at all, a "
                 "reshards_with of so many ranks."));
}

}  // namespace

UnitRanks ranks_of_unit(FsdpOptions& options, c10::Device device) {
  UnitRanks ranks = sharing_of(options);
  const RankOf where = ranks.sharers->rank_of();
  check_resharding(options, where);
  const int64_t among = options.reshard_among;
  if (among > 0) options.reshard_after_forward = among > 1;
  if (among <= 1 || among == where.world) return ranks;
  ranks.reshards_with = options.reshards_with;
  if (ranks.reshards_with || !ParamGroup::gathers_over(*ranks.sharers, device)) return ranks;
  ranks.reshards_with = split_contiguous(*ranks.sharers, among);
  TORCH_CHECK_NOT_IMPLEMENTED(
      ranks.reshards_with,
      error_text("fully_shard", "got a communicator that cannot make one of some of its ranks",
                 where, "Pass FsdpOptions::reshards_with, or leave reshard_among out."));
  return ranks;
}

std::shared_ptr<ParamGroup> make_param_group(ParamGroupRequest request) {
  std::vector<ParameterInfo> infos;
  for (const ShardedParamSpec& spec : request.specs) {
    infos.push_back(stored_info(spec, spec.dtype));
    infos.back().sizes = spec.sizes;
  }
  const std::string difference =
      difference_between_ranks(*request.communicator, request.device, infos, "fully_shard");
  TORCH_CHECK_VALUE(difference.empty(), difference);
  return std::make_shared<ParamGroup>(std::move(request));
}

}  // namespace trireme

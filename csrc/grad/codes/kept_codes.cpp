#include <trireme/grad/codes/kept_codes.h>

#include <utility>

namespace trireme {

std::vector<CodedShard> coded_shards(const std::vector<ParameterInfo>& parameters,
                                     const OwnShards& own) {
  std::vector<CodedShard> shards;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& ranges = own.plan->shards[i];
    const ShardRange& range = ranges[static_cast<size_t>(own.rank)];
    const auto sizes_of = [&](const ShardRange& one) {
      return shard_sizes(parameters[i], one, own.plan->placement);
    };
    // Rows are split so that no rank has more than the first one.
    shards.push_back({sizes_of(range), range.numel, sizes_of(ranges.front())});
  }
  return shards;
}

std::string KeptCodes::shard_text() const {
  if (!own) return {};
  return " of shard " + std::to_string(own.rank) + "/" + std::to_string(own.plan->world);
}

std::vector<KeptPart> KeptCodes::parts(bool makes) const {
  if (!own) return coder->kept_parts(parameters, tensors, makes);
  const std::vector<CodedShard> shards = coded_shards(parameters, own);
  std::vector<CodedParameter> coded;
  for (size_t i = 0; i < parameters.size(); ++i)
    coded.push_back({tensors[i], parameters[i].name, shards[i].sizes, shards[i].numel,
                     static_cast<int64_t>(i), /*offset=*/0, /*arrived=*/true, shards[i].largest});
  std::vector<KeptPart> found = coder->kept_parts(coded, makes);
  for (KeptPart& part : found) {
    const int64_t reals = tensors[static_cast<size_t>(part.number)].is_complex() ? 2 : 1;
    part.numel = parameters[static_cast<size_t>(part.number)].numel * reals;
    part.begin += own.plan->of(part.number, own.rank).begin * reals;
  }
  return found;
}

}  // namespace trireme

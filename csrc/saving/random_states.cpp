#include <trireme/saving/random_states.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

namespace trireme {
namespace {

std::string prefix_of(RankOf where) {
  return "cpp/" + std::to_string(where.world) + "/" + std::to_string(where.rank) + "/";
}

// The default generators of this rank, by name.
std::vector<std::pair<std::string, at::Generator>> generators_of(const CheckpointRanks& ranks) {
  std::vector<std::pair<std::string, at::Generator>> found{
      {"torch", at::detail::getDefaultCPUGenerator()}};
  if (ranks.device.is_cuda())
    found.emplace_back("cuda" + std::to_string(std::max<int>(ranks.device.index(), 0)),
                       at::globalContext().defaultGenerator(ranks.device));
  return found;
}

}  // namespace

std::vector<CheckpointTensor> random_to_save(const CheckpointRanks& ranks) {
  std::vector<CheckpointTensor> tensors;
  for (auto& [name, generator] : generators_of(ranks)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::Tensor state = generator.get_state();
    tensors.push_back(
        {prefix_of(ranks.where()) + name, at::kByte, state.sizes().vec(), {state.clone()}});
  }
  return tensors;
}

bool load_random(const CheckpointSource& source, const CheckpointRanks& ranks) {
  const auto& saved = source.tensors(kRandomTensors);
  const RankOf where = ranks.where();
  for (int64_t rank = 0; rank < where.world; ++rank)
    if (saved.count(prefix_of({rank, where.world}) + "torch") == 0) return false;
  std::vector<CheckpointTensor> needed;
  std::vector<at::Generator> generators;
  for (auto& [name, generator] : generators_of(ranks)) {
    const auto found = saved.find(prefix_of(where) + name);
    if (found == saved.end()) continue;
    CheckpointTensor tensor = found->second;
    tensor.part.values = at::empty(tensor.sizes, at::kByte);
    needed.push_back(std::move(tensor));
    generators.push_back(generator);
  }
  source.read(kRandomTensors, needed);
  together(ranks, [&] {
    for (size_t i = 0; i < needed.size(); ++i) {
      const std::lock_guard<std::mutex> lock(generators[i].mutex());
      generators[i].set_state(needed[i].part.values);
    }
  });
  return true;
}

}  // namespace trireme

#include <trireme/saving/held_checkpoint.h>

#include <trireme/saving/content_text.h>
#include <trireme/saving/redistribute.h>

#include <utility>

namespace trireme {

HeldCheckpoint::HeldCheckpoint(HeldContent held, CheckpointRanks ranks)
    : CheckpointSource(std::move(ranks)), held_(std::move(held)) {
  const auto all = gather_contents(held_.content, ContentGoes::kToRanks, ranks_);
  for (const ContentOfRank& content : all)
    for (const auto& [kind, places] : content.tensors)
      for (const TensorPlace& place : places)
        tensors_[kind].try_emplace(place.name,
                                   CheckpointTensor{place.name, place.dtype, place.sizes});
  texts_ = merge_texts(all, ranks_.where());
}

bool HeldCheckpoint::has(const std::string& kind) const { return tensors_.count(kind) > 0; }

const std::map<std::string, CheckpointTensor>& HeldCheckpoint::tensors(
    const std::string& kind) const {
  static const std::map<std::string, CheckpointTensor> none;
  const auto found = tensors_.find(kind);
  return found == tensors_.end() ? none : found->second;
}

std::string HeldCheckpoint::text(const std::string& name) const {
  const auto found = texts_.find(name);
  return found == texts_.end() ? "" : found->second;
}

void HeldCheckpoint::read(const std::string& kind,
                          const std::vector<CheckpointTensor>& tensors) const {
  const auto held = held_.content.tensors.find(kind);
  RedistributeRequest request{{}, tensors, held_.of_lowest};
  if (held != held_.content.tensors.end()) request.held = held->second;
  redistribute(request, ranks_);
}

}  // namespace trireme

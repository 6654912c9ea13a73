#include <trireme/saving/redistribute.h>

#include <trireme/saving/content_text.h>
#include <trireme/saving/part_exchange.h>
#include <trireme/saving/redistribute_plan.h>

#include <ATen/ATen.h>

#include <algorithm>

// See [Note: redistributing without files] in redistribute.h.

namespace trireme {
namespace {

// The kinds of tensors in what ranks tell each other.
constexpr const char* kHeld = "held";
constexpr const char* kOfLowest = "of lowest";
constexpr const char* kNeeded = "needed";

CheckpointContent content_of(const RedistributeRequest& request) {
  CheckpointContent content;
  content.tensors[kNeeded] = request.needed;
  for (const CheckpointTensor& tensor : request.held) {
    const bool is_of_lowest = request.of_lowest.count(tensor.name) > 0;
    content.tensors[is_of_lowest ? kOfLowest : kHeld].push_back(tensor);
  }
  return content;
}

// The bytes of a part in memory, gaps included.
struct Span {
  const char* begin;
  const char* end;
  const CheckpointTensor* tensor;
};

std::vector<Span> spans_of(const std::vector<CheckpointTensor>& tensors) {
  std::vector<Span> spans;
  for (const CheckpointTensor& tensor : tensors) {
    const at::Tensor& values = tensor.part.values;
    if (!values.defined() || values.numel() == 0) continue;
    int64_t last = 0;  // index of the last element in memory
    for (int64_t dim = 0; dim < values.dim(); ++dim)
      last += (values.size(dim) - 1) * values.stride(dim);
    const auto* begin = static_cast<const char*>(values.const_data_ptr());
    spans.push_back({begin, begin + (last + 1) * int64_t(values.element_size()), &tensor});
  }
  return spans;
}

// Returns whether each element of both parts of a tensor has the same place in memory.
bool are_views_of_one(const CheckpointTensor& one, const CheckpointTensor& other) {
  const at::Tensor& values = one.part.values;
  if (one.name != other.name || values.scalar_type() != other.part.values.scalar_type())
    return false;
  const auto first = [](const CheckpointTensor& tensor, int64_t dim) {
    return tensor.part.first.empty() ? 0 : tensor.part.first[static_cast<size_t>(dim)];
  };
  int64_t distance = 0;  // from the begin of `one` to that of `other`, in elements
  for (int64_t dim = 0; dim < values.dim(); ++dim) {
    const bool is_one_row = one.sizes[static_cast<size_t>(dim)] == 1;
    if (!is_one_row && values.stride(dim) != other.part.values.stride(dim)) return false;
    distance += (first(other, dim) - first(one, dim)) * values.stride(dim);
  }
  return static_cast<const char*>(values.const_data_ptr()) +
             distance * int64_t(values.element_size()) ==
         static_cast<const char*>(other.part.values.const_data_ptr());
}

// Throws ValueError if a part to write lies over a held one that is then still to be read.
void refuse_overlaps(const RedistributeRequest& request, RankOf where) {
  std::vector<Span> held = spans_of(request.held);
  std::sort(held.begin(), held.end(),
            [](const Span& one, const Span& other) { return one.begin < other.begin; });
  std::vector<const char*> ends;  // the greatest end up to there
  for (const Span& span : held)
    ends.push_back(ends.empty() ? span.end : std::max(ends.back(), span.end));
  for (const Span& needed : spans_of(request.needed)) {
    const auto after =
        std::lower_bound(held.begin(), held.end(), needed.end,
                         [](const Span& span, const char* end) { return span.begin < end; });
    for (auto i = static_cast<size_t>(after - held.begin()); i-- > 0 && ends[i] > needed.begin;)
      TORCH_CHECK_VALUE(
          held[i].end <= needed.begin || are_views_of_one(*held[i].tensor, *needed.tensor),
          error_text("saving",
                     "got memory for '" + needed.tensor->name + "' that lies over '" +
                         held[i].tensor->name + "', which is to be sent",
                     where, "Make what comes after in memory of its own."));
  }
}

}  // namespace

void redistribute(const RedistributeRequest& request, const CheckpointRanks& ranks) {
  const auto all = gather_contents(content_of(request), ContentGoes::kToRanks, ranks);
  together(ranks, [&] { refuse_overlaps(request, ranks.where()); });
  PlacesByRank held = places_of(all, kHeld);
  const PlacesByRank of_lowest = places_of(all, kOfLowest), needed = places_of(all, kNeeded);
  RedistributePlanRequest asked{.held = held, .needed = needed, .hosts = hosts_of(all)};
  for (size_t rank = 0; rank < held.size(); ++rank)
    for (const TensorPlace& place : of_lowest[rank]) {
      held[rank].push_back(place);
      asked.of_lowest.insert(place.name);
    }
  const RedistributePlan plan = plan_redistribute(asked, ranks.where());
  PartExchange(plan, request.held, request.needed, ranks).run();
}

}  // namespace trireme

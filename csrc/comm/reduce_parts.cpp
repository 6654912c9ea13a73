#include <trireme/comm/reduce_parts.h>

#include <trireme/comm/shm_tensors.h>
#include <trireme/shm/reduce.h>

#include <ATen/Parallel.h>

#include <cstddef>
#include <vector>

namespace trireme {
namespace {

shm::ReduceOp to_shm(ReduceOp op) {
  if (op == ReduceOp::kSum) return shm::ReduceOp::kSum;
  return op == ReduceOp::kMin ? shm::ReduceOp::kMin : shm::ReduceOp::kMax;
}

}  // namespace

void reduce_parts(const at::Tensor& output, const at::Tensor& parts, ReduceOp op, int64_t world) {
  constexpr int64_t kGrain = 1 << 16;
  const auto item_bytes = static_cast<int64_t>(output.element_size());
  const auto part_bytes = static_cast<int64_t>(output.nbytes());
  auto* sums = static_cast<std::byte*>(output.mutable_data_ptr());
  const auto* data = static_cast<const std::byte*>(parts.const_data_ptr());
  const shm::Dtype dtype = shm_dtype(output.scalar_type());
  at::parallel_for(0, output.numel(), kGrain, [&](int64_t begin, int64_t end) {
    std::vector<const void*> sources;
    for (int64_t rank = 0; rank < world; ++rank)
      sources.push_back(data + rank * part_bytes + begin * item_bytes);
    const shm::ReduceRequest request{dtype, to_shm(op), end - begin, sources};
    shm::reduce(sums + begin * item_bytes, nullptr, request, false);
  });
}

}  // namespace trireme

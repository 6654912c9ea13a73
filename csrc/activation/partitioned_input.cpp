#include <trireme/activation/partitioned_input.h>

#include <trireme/activation/partition.h>
#include <trireme/common/resolved.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/memory/value_hash.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <utility>

namespace trireme {

bool is_partitioned(const at::Tensor& input) {
  return input.defined() && !input.unsafeGetTensorImpl()->is_python_dispatch() &&
         input.layout() == at::kStrided && !input.is_nested() && input.has_storage() &&
         !input.is_meta() && !input.is_quantized() && is_resolved(input) && !input.is_inference() &&
         !(input.is_leaf() && input.requires_grad()) && input.is_non_overlapping_and_dense() &&
         static_cast<int64_t>(input.nbytes()) >= kLeastPartitionedBytes;
}

std::string text_of_tensor(const at::Tensor& tensor) {
  std::string text = c10::str(tensor.scalar_type(), tensor.sizes());
  if (!tensor.is_contiguous()) text += c10::str(" with strides ", tensor.strides());
  if (!tensor.is_cpu()) text += c10::str(" on ", tensor.device().type());
  return text;
}

at::Tensor flat_view(const at::Tensor& tensor) {
  return range_of(tensor, {tensor.numel()}, {1}, tensor.storage_offset());
}

int64_t hash_of_bits(const at::Tensor& tensor) {
  constexpr int64_t kRow = 1024;
  constexpr auto kWordBytes = static_cast<int64_t>(sizeof(int64_t));
  at::Tensor words = flat_view(tensor);
  const auto bytes = static_cast<int64_t>(words.nbytes());
  const int64_t before = words.storage_offset() * static_cast<int64_t>(words.element_size());
  uint64_t hash = 0;
  if (!words.is_cpu() && bytes % kWordBytes == 0 && before % kWordBytes == 0) {
    words = words.view(at::kLong);
    const int64_t whole = words.numel() / kRow * kRow;
    if (whole > 0) {
      const at::Tensor rows = words.narrow(0, 0, whole).view({-1, kRow});
      for (const int64_t dim : {0, 1})
        hash = 31 * hash + hash_of_values(at::hash_tensor(rows, dim));
      words = words.narrow(0, whole, words.numel() - whole);
    }
  }
  return static_cast<int64_t>(31 * hash + hash_of_values(words));
}

std::string InputOrigin::text(const std::string& tensor) const {
  return "input " + std::to_string(input) + " of " + *function + " (" + tensor + ")";
}

PartitionedInput::PartitionedInput(const at::Tensor& input, InputOrigin origin, RankOf where,
                                   std::shared_ptr<KeptBytes> kept)
    : sizes_(input.sizes().vec()),
      strides_(input.strides().vec()),
      dtype_(input.scalar_type()),
      counter_(input.unsafeGetTensorImpl()->version_counter()),
      version_(counter_.current_version()),
      origin_(std::move(origin)),
      where_(where),
      kept_(std::move(kept)) {
  count(&KeptBytes::inputs, static_cast<int64_t>(input.nbytes()));
}

PartitionedInput::~PartitionedInput() { count_no_more(); }

void PartitionedInput::release_resources() {
  drop();
  count_no_more();
}

void PartitionedInput::count_no_more() {
  for (const auto& [which, bytes] : counted_) (*kept_).*which -= bytes;
  counted_.clear();
}

void PartitionedInput::count(std::atomic<int64_t> KeptBytes::* which, int64_t bytes) {
  counted_.emplace_back(which, bytes);
  (*kept_).*which += bytes;
}

at::Tensor PartitionedInput::unpack() {
  TORCH_CHECK(
      !fork_guard_.in_child(),
      error_text("checkpoint",
                 "got " + text() + " of partition= in a forked child of the process that packed it",
                 where_, "Run the backward in the process that ran the forward."));
  TORCH_CHECK(
      counter_.current_version() == version_,
      error_text("checkpoint",
                 "one of the variables needed for gradient computation has been modified "
                 "by an inplace operation: " +
                     text() + " is at version " + std::to_string(counter_.current_version()) +
                     ", expected version " + std::to_string(version_),
                 where_, "Let inputs of a checkpoint be as they are until the backward."));
  return restore();
}

bool PartitionedInput::holds(const at::Tensor& tensor) const {
  return tensor._version() == version_ && tensor.sizes() == sizes() &&
         tensor.strides() == strides() && tensor.scalar_type() == dtype_;
}

std::string PartitionedInput::text() const {
  return origin_.text(c10::str(dtype_, at::IntArrayRef(sizes_)));
}

}  // namespace trireme

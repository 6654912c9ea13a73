#include <trireme/kernels/cpu/parallel.h>
#include <trireme/kernels/cpu/runs.h>
#include <trireme/kernels/flatten_check.h>
#include <trireme/kernels/span.h>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include <algorithm>

namespace trireme::cpu {
namespace {

// Calls move(part of flat, the tensor elements that belong there) until all are moved. The work is
// cut by elements and not by tensors, so that one large tensor does not leave the other threads
// idle.
template <typename Move>
void for_parts(at::TensorList tensors, const at::Tensor& flat, const Move& move) {
  const Span whole = span_of(flat);
  c10::SmallVector<Span, 64> spans;
  c10::SmallVector<int64_t, 64> ends;  // in flat
  for (const at::Tensor& tensor : tensors) {
    spans.push_back(span_of(tensor));
    ends.push_back((ends.empty() ? 0 : ends.back()) + spans.back().numel);
  }
  for_ranges(whole.numel, [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t tensor_begin = ends[i] - spans[i].numel;
      const int64_t stop = std::min(end, ends[i]);
      move(slice(whole, begin, stop), slice(spans[i], begin - tensor_begin, stop - tensor_begin));
      begin = stop;
      ++i;
    }
  });
}

void flatten(at::TensorList inputs, const at::Tensor& flat, double scale) {
  check_flatten("flatten", inputs, flat);
  for_parts(inputs, flat, [scale](Span part, Span input) { copy_run(part, input, scale); });
}

void flatten_accumulate(at::TensorList inputs, const at::Tensor& flat, double scale) {
  check_flatten("flatten_accumulate", inputs, flat);
  for_parts(inputs, flat, [scale](Span part, Span input) { add_run(part, input, scale); });
}

void unflatten(const at::Tensor& flat, at::TensorList outputs, double scale) {
  check_flatten("unflatten", outputs, flat);
  for_parts(outputs, flat, [scale](Span part, Span output) { copy_run(output, part, scale); });
}

}  // namespace

TORCH_LIBRARY_IMPL(trireme, CPU, m) {
  m.impl("flatten.into", &flatten);
  m.impl("flatten_accumulate", &flatten_accumulate);
  m.impl("unflatten", &unflatten);
}

}  // namespace trireme::cpu

#include <trireme/kernels/optimizer_step.h>

#include <trireme/kernels/cpu/optimizer_loops.h>
#include <trireme/kernels/cpu/parallel.h>
#include <trireme/kernels/cpu/runs.h>
#include <trireme/kernels/span.h>

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace trireme {
namespace cpu {
namespace {

// The elements that are converted at a time, in buffers that stay in the nearest cache.
constexpr int64_t kStepBlock = 512;

const OptimizerLoops& best_optimizer_loops() {
  static const OptimizerLoops& best = supported_optimizer_loops().back();
  return best;
}

void run_loop(const OptimizerSegment& segment, bool is_double, const AdamScalars& scalars) {
  best_optimizer_loops().adam[is_double ? 1 : 0](segment, scalars);
}

void run_loop(const OptimizerSegment& segment, bool is_double, const SgdScalars& scalars) {
  best_optimizer_loops().sgd[is_double ? 1 : 0](segment, scalars);
}

void run_loop(const OptimizerSegment& segment, bool is_double, const AdagradScalars& scalars) {
  best_optimizer_loops().adagrad[is_double ? 1 : 0](segment, scalars);
}

// Steps one block by way of buffers in the dtype computed in, if memory has another dtype.
template <typename Scalars>
void step_block(OptimizerSegment block, SegmentDtypes dtypes, Scalars scalars) {
  const at::ScalarType computed = optimizer_state_dtype(dtypes.param);
  alignas(64) char params[kStepBlock * sizeof(double)];
  alignas(64) char grads[kStepBlock * sizeof(double)];
  const Span param = {block.param, dtypes.param, block.numel};
  const Span grad = {block.grad, dtypes.grad, block.numel};
  const Span param_buffer = {params, computed, block.numel};
  const Span grad_buffer = {grads, computed, block.numel};
  if (dtypes.param != computed) {
    copy_run(param_buffer, param, 1.0);
    block.param = params;
  }
  if (dtypes.grad != computed || scalars.write_grad) {
    copy_run(grad_buffer, grad, scalars.write_grad ? scalars.grad_factor : 1.0);
    block.grad = grads;
  }
  if (scalars.write_grad) {
    copy_run(grad, grad_buffer, 1.0);
    scalars.grad_factor = 1;
  }
  run_loop(block, computed == at::kDouble, scalars);
  if (dtypes.param != computed) copy_run(param, param_buffer, 1.0);
}

template <typename Scalars>
void step_segment(const OptimizerSegment& segment, SegmentDtypes dtypes, const Scalars& scalars) {
  const at::ScalarType computed = optimizer_state_dtype(dtypes.param);
  if (dtypes.param == computed && dtypes.grad == computed && !scalars.write_grad) {
    return run_loop(segment, computed == at::kDouble, scalars);
  }
  for (int64_t begin = 0; begin < segment.numel; begin += kStepBlock) {
    const int64_t end = std::min(begin + kStepBlock, segment.numel);
    step_block(slice(segment, dtypes, begin, end), dtypes, scalars);
  }
}

// Cuts the work by elements and not by segments, so that one large segment does not leave the other
// threads idle.
template <typename Scalars>
void step_segments(c10::ArrayRef<OptimizerSegment> segments, SegmentDtypes dtypes,
                   const Scalars& scalars) {
  c10::SmallVector<int64_t, 64> ends;
  int64_t numel = 0;
  for (const OptimizerSegment& segment : segments) ends.push_back(numel += segment.numel);
  for_ranges(numel, [&](int64_t begin, int64_t end) {
    auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    while (begin < end) {
      const int64_t segment_begin = ends[i] - segments[i].numel;
      const int64_t stop = std::min(end, ends[i]);
      step_segment(slice(segments[i], dtypes, begin - segment_begin, stop - segment_begin), dtypes,
                   scalars);
      begin = stop;
      ++i;
    }
  });
}

}  // namespace
}  // namespace cpu

at::ScalarType optimizer_state_dtype(at::ScalarType param) {
  const bool is_double = c10::toRealValueType(param) == at::kDouble;
  const at::ScalarType real = is_double ? at::kDouble : at::kFloat;
  return c10::isComplexType(param) ? c10::toComplexType(real) : real;
}

OptimizerSegment slice(const OptimizerSegment& segment, SegmentDtypes dtypes, int64_t begin,
                       int64_t end) {
  const auto skip = [begin](void* data, at::ScalarType dtype) -> void* {
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
    return data == nullptr ? nullptr : static_cast<char*>(data) + begin * bytes;
  };
  const at::ScalarType state = optimizer_state_dtype(dtypes.param);
  return {skip(segment.param, dtypes.param),   skip(segment.grad, dtypes.grad),
          skip(segment.exp_avg, state),        skip(segment.exp_avg_sq, state),
          skip(segment.max_exp_avg_sq, state), end - begin};
}

void adam_segments(c10::ArrayRef<OptimizerSegment> segments, SegmentDtypes dtypes,
                   const AdamScalars& scalars) {
  cpu::step_segments(segments, dtypes, scalars);
}

void sgd_segments(c10::ArrayRef<OptimizerSegment> segments, SegmentDtypes dtypes,
                  const SgdScalars& scalars) {
  cpu::step_segments(segments, dtypes, scalars);
}

void adam_segment(const OptimizerSegment& segment, SegmentDtypes dtypes,
                  const AdamScalars& scalars) {
  cpu::step_segment(segment, dtypes, scalars);
}

void sgd_segment(const OptimizerSegment& segment, SegmentDtypes dtypes, const SgdScalars& scalars) {
  cpu::step_segment(segment, dtypes, scalars);
}

void adagrad_segment(const OptimizerSegment& segment, SegmentDtypes dtypes,
                     const AdagradScalars& scalars) {
  cpu::step_segment(segment, dtypes, scalars);
}

void rowwise_adagrad_row(const OptimizerSegment& row, SegmentDtypes dtypes,
                         const AdagradScalars& scalars) {
  const at::ScalarType computed = optimizer_state_dtype(dtypes.param);
  const auto step = cpu::best_optimizer_loops().rowwise_adagrad[computed == at::kDouble ? 1 : 0];
  if (dtypes.param == computed && dtypes.grad == computed) return step(row, scalars);
  // The sum needs all of the row, so it is converted whole.
  OptimizerSegment converted = row;
  c10::SmallVector<double, cpu::kStepBlock> params(static_cast<size_t>(row.numel));
  c10::SmallVector<double, cpu::kStepBlock> grads(static_cast<size_t>(row.numel));
  const Span param = {params.data(), computed, row.numel};
  scaled_copy(param, {row.param, dtypes.param, row.numel}, 1.0);
  scaled_copy({grads.data(), computed, row.numel}, {row.grad, dtypes.grad, row.numel}, 1.0);
  converted.param = params.data();
  converted.grad = grads.data();
  step(converted, scalars);
  scaled_copy({row.param, dtypes.param, row.numel}, param, 1.0);
}

}  // namespace trireme

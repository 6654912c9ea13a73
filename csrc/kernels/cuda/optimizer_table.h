#pragma once

#include <trireme/kernels/cuda/block_search.h>
#include <trireme/kernels/optimizer_math.h>

#include <cstdint>

// The arithmetic of the CUDA optimizer kernels: which thread of which block updates which elements.
// Plain C++ without CUDA or torch headers, so that it is tested on machines without a GPU.
namespace trireme::cuda {

inline constexpr int kTableSegments = 512;
inline constexpr int kOptimizerThreads = 256;     // per block
inline constexpr int64_t kOptimizerChunk = 8192;  // elements per block, at most

// The argument of one launch. Segment s has blocks [block_begin[s], block_begin[s + 1]) of the
// grid. Only the first `segments` entries (plus one of the beginnings) are ever written or read.
struct OptimizerTable {
  int32_t segments;
  const float* grad_scale;  // nullptr if there is none, as below
  const float* found_inf;
  int32_t block_begin[kTableSegments + 1];
  int64_t numel[kTableSegments];
  void* param[kTableSegments];
  void* grad[kTableSegments];
  void* states[3][kTableSegments];       // in the order of OptimizerSegment
  const float* counter[kTableSegments];  // the step number; nullptr if the scalars hold it
};
// CUDA takes kernel arguments of up to 32764 bytes on every GPU that torch supports.
static_assert(sizeof(OptimizerTable) + sizeof(AdamScalars) <= 32764);

inline void clear(OptimizerTable& table) {
  table.segments = 0;
  table.block_begin[0] = 0;
}

// Adds a segment. Returns false, with nothing changed, if the table is full. Empty ones take no
// room.
inline bool append(OptimizerTable& table, const OptimizerSegment& segment, const float* counter) {
  if (segment.numel == 0) return true;
  if (table.segments == kTableSegments) return false;
  const int32_t s = table.segments++;
  const auto blocks = static_cast<int32_t>((segment.numel + kOptimizerChunk - 1) / kOptimizerChunk);
  table.param[s] = segment.param;
  table.grad[s] = segment.grad;
  table.states[0][s] = segment.exp_avg;
  table.states[1][s] = segment.exp_avg_sq;
  table.states[2][s] = segment.max_exp_avg_sq;
  table.counter[s] = counter;
  table.numel[s] = segment.numel;
  table.block_begin[s + 1] = table.block_begin[s] + blocks;
  return true;
}

inline int32_t blocks_of(const OptimizerTable& table) { return table.block_begin[table.segments]; }

// Returns the segment that a block works for.
TRIREME_HOST_DEVICE int32_t segment_of(const OptimizerTable& table, int32_t block) {
  return find_by_block(table.block_begin, table.segments, block);
}

// The elements of one block, with kStates states of type T, the type computed in.
template <typename Param, typename Grad, typename T, int kStates>
struct OptimizerChunk {
  Param* param;
  Grad* grad;
  T* states[kStates == 0 ? 1 : kStates];
  int32_t numel;
  bool write_grad;
};

template <typename Param, typename Grad, typename T, int kStates>
TRIREME_HOST_DEVICE OptimizerChunk<Param, Grad, T, kStates> chunk_of(const OptimizerTable& table,
                                                                     int32_t segment, int32_t block,
                                                                     bool write_grad) {
  const int64_t begin = (block - table.block_begin[segment]) * kOptimizerChunk;
  const int64_t left = table.numel[segment] - begin;
  OptimizerChunk<Param, Grad, T, kStates> chunk = {};
  chunk.param = static_cast<Param*>(table.param[segment]) + begin;
  chunk.grad = static_cast<Grad*>(table.grad[segment]) + begin;
  for (int s = 0; s < kStates; ++s) {
    chunk.states[s] = static_cast<T*>(table.states[s][segment]) + begin;
  }
  chunk.numel = static_cast<int32_t>(left < kOptimizerChunk ? left : kOptimizerChunk);
  chunk.write_grad = write_grad;
  return chunk;
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) OptimizerPack {
  T values[kWidth];
};

template <int kWidth, typename T>
TRIREME_HOST_DEVICE OptimizerPack<T, kWidth>* packs_of(T* data) {
  return reinterpret_cast<OptimizerPack<T, kWidth>*>(data);
}

// Updates kWidth adjacent elements, pack number p. All loads come before the first store, so that
// they are in flight together.
template <int kWidth, typename Op, typename Param, typename Grad, typename T, int kStates>
TRIREME_HOST_DEVICE void update_pack(const OptimizerChunk<Param, Grad, T, kStates>& chunk,
                                     int32_t p, const Op& op) {
  auto param = packs_of<kWidth>(chunk.param)[p];
  auto grad = packs_of<kWidth>(chunk.grad)[p];
  OptimizerPack<T, kWidth> states[kStates == 0 ? 1 : kStates];
  for (int s = 0; s < kStates; ++s) states[s] = packs_of<kWidth>(chunk.states[s])[p];
  for (int i = 0; i < kWidth; ++i) {
    T element[3] = {};
    for (int s = 0; s < kStates; ++s) element[s] = states[s].values[i];
    op(param.values[i], grad.values[i], element);
    for (int s = 0; s < kStates; ++s) states[s].values[i] = element[s];
  }
  packs_of<kWidth>(chunk.param)[p] = param;
  if (chunk.write_grad) packs_of<kWidth>(chunk.grad)[p] = grad;
  for (int s = 0; s < kStates; ++s) packs_of<kWidth>(chunk.states[s])[p] = states[s];
}

// Does the share of thread `lane` of kOptimizerThreads, kWidth adjacent elements at a time.
template <int kWidth, typename Op, typename Param, typename Grad, typename T, int kStates>
TRIREME_HOST_DEVICE void update_packs(const OptimizerChunk<Param, Grad, T, kStates>& chunk,
                                      int32_t lane, const Op& op) {
  const int32_t packs = chunk.numel / kWidth;
  for (int32_t p = lane; p < packs; p += kOptimizerThreads) update_pack<kWidth>(chunk, p, op);
  for (int32_t i = packs * kWidth + lane; i < chunk.numel; i += kOptimizerThreads) {
    update_pack<1>(chunk, i, op);
  }
}

template <int kWidth, typename T>
TRIREME_HOST_DEVICE bool is_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % alignof(OptimizerPack<T, kWidth>) == 0;
}

// Uses 16-byte accesses on the widest side if all are aligned for it, else one element at a time.
template <typename Op, typename Param, typename Grad, typename T, int kStates>
TRIREME_HOST_DEVICE void update_chunk(const OptimizerChunk<Param, Grad, T, kStates>& chunk,
                                      int32_t lane, const Op& op) {
  constexpr int kWidth = 16 / sizeof(T);
  bool aligned = is_aligned<kWidth>(chunk.param) && is_aligned<kWidth>(chunk.grad);
  for (int s = 0; s < kStates; ++s) aligned = aligned && is_aligned<kWidth>(chunk.states[s]);
  if (aligned) {
    update_packs<kWidth>(chunk, lane, op);
  } else {
    update_packs<1>(chunk, lane, op);
  }
}

// The update of one element in memory's types. Numbers::widen and cast<To> convert; Numbers is the
// Math of optimizer_math.h, too. The factors' own grad_factor is the sign alone, because the
// gradient stored in grad has none.
template <typename Numbers, bool kL2, bool kAmsgrad, typename T>
struct AdamOp {
  AdamFactors<T> factors;
  T grad_factor;

  template <typename Param, typename Grad>
  TRIREME_HOST_DEVICE void operator()(Param& param, Grad& grad, T* states) const {
    const T scaled = static_cast<T>(Numbers::widen(grad)) * grad_factor;
    AdamElement<T> e = {static_cast<T>(Numbers::widen(param)), scaled, states[0], states[1],
                        states[2]};
    update<Numbers, kL2, kAmsgrad>(e, factors);
    param = Numbers::template cast<Param>(e.param);
    grad = Numbers::template cast<Grad>(scaled);
    states[0] = e.exp_avg;
    states[1] = e.exp_avg_sq;
    states[2] = e.max_exp_avg_sq;
  }
};

template <typename Numbers, bool kL2, bool kMomentum, bool kNesterov, typename T>
struct SgdOp {
  SgdFactors<T> factors;
  T grad_factor;

  template <typename Param, typename Grad>
  TRIREME_HOST_DEVICE void operator()(Param& param, Grad& grad, T* states) const {
    const T scaled = static_cast<T>(Numbers::widen(grad)) * grad_factor;
    SgdElement<T> e = {static_cast<T>(Numbers::widen(param)), scaled, states[0]};
    update<Numbers, kL2, kMomentum, kNesterov>(e, factors);
    param = Numbers::template cast<Param>(e.param);
    grad = Numbers::template cast<Grad>(scaled);
    states[0] = e.momentum_buffer;
  }
};

}  // namespace trireme::cuda

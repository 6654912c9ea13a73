#pragma once

#include <trireme/kernels/cuda/block_search.h>
#include <trireme/kernels/cuda/real.h>

#include <cstdint>

// The arithmetic of the CUDA flatten kernels: which thread of which block moves which elements.
// Plain C++ without CUDA or torch headers, so that it is tested on machines without a GPU.
namespace trireme::cuda {

inline constexpr int kTableTensors = 512;
inline constexpr int kThreads = 256;     // per block
inline constexpr int64_t kChunk = 8192;  // elements per block, at most

// The argument of one launch: tensors and where they lie in `flat`. Tensor t has elements
// [flat_begin[t], flat_begin[t + 1]) of flat and blocks [block_begin[t], block_begin[t + 1]) of the
// grid. Only the first `tensors` entries (plus one of the arrays of beginnings) are ever written or
// read.
struct FlattenTable {
  void* flat;
  double scale;
  Real flat_dtype;
  int32_t tensors;
  int32_t block_begin[kTableTensors + 1];
  int64_t flat_begin[kTableTensors + 1];
  void* data[kTableTensors];
  Real dtype[kTableTensors];
};
// CUDA takes kernel arguments of up to 32764 bytes on every GPU that torch supports.
static_assert(sizeof(FlattenTable) <= 32764);

// The part that one block moves: elements [begin, begin + numel) of a tensor.
struct Chunk {
  int32_t tensor;
  int64_t begin;
  int32_t numel;
};

// Empties the table; the next tensor will lie at element `flat_begin` of flat.
inline void clear(FlattenTable& table, int64_t flat_begin) {
  table.tensors = 0;
  table.block_begin[0] = 0;
  table.flat_begin[0] = flat_begin;
}

// Adds the next tensor. Returns false, with nothing changed, if the table is full. Empty tensors
// take no room.
inline bool append(FlattenTable& table, void* data, Real dtype, int64_t numel) {
  if (numel == 0) return true;
  if (table.tensors == kTableTensors) return false;
  const int32_t t = table.tensors++;
  const auto blocks = static_cast<int32_t>((numel + kChunk - 1) / kChunk);
  table.data[t] = data;
  table.dtype[t] = dtype;
  table.flat_begin[t + 1] = table.flat_begin[t] + numel;
  table.block_begin[t + 1] = table.block_begin[t] + blocks;
  return true;
}

inline int32_t blocks_of(const FlattenTable& table) { return table.block_begin[table.tensors]; }

TRIREME_HOST_DEVICE Chunk locate(const FlattenTable& table, int32_t block) {
  const int32_t tensor = find_by_block(table.block_begin, table.tensors, block);
  const int64_t begin = (block - table.block_begin[tensor]) * kChunk;
  const int64_t left = table.flat_begin[tensor + 1] - table.flat_begin[tensor] - begin;
  return {tensor, begin, static_cast<int32_t>(left < kChunk ? left : kChunk)};
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T values[kWidth];
};

// Sets dst[p] = op(src[p], dst[p]) for packs p = first, first + kThreads, ... (kCount of them). All
// loads come before the first store, so that they are in flight together.
template <int kCount, int kWidth, typename Dst, typename Src, typename Op>
TRIREME_HOST_DEVICE void move_round(Pack<Dst, kWidth>* dst, const Pack<Src, kWidth>* src,
                                    int32_t first, const Op& op) {
  Pack<Src, kWidth> in[kCount];
  Pack<Dst, kWidth> out[kCount] = {};
  for (int r = 0; r < kCount; ++r) in[r] = src[first + r * kThreads];
  if constexpr (Op::kReadsDst) {
    for (int r = 0; r < kCount; ++r) out[r] = dst[first + r * kThreads];
  }
  for (int r = 0; r < kCount; ++r) {
    for (int i = 0; i < kWidth; ++i) out[r].values[i] = op(in[r].values[i], out[r].values[i]);
    dst[first + r * kThreads] = out[r];
  }
}

// Does the share of thread `lane` of kThreads in dst[i] = op(src[i], dst[i]) for i in [0, numel),
// kWidth adjacent elements at a time. A whole chunk is a whole number of rounds.
template <int kWidth, typename Dst, typename Src, typename Op>
TRIREME_HOST_DEVICE void move_packs(Dst* dst, const Src* src, int32_t numel, int32_t lane,
                                    const Op& op) {
  constexpr int kRound = kWidth == 1 ? 8 : 4;
  auto* dst_packs = reinterpret_cast<Pack<Dst, kWidth>*>(dst);
  const auto* src_packs = reinterpret_cast<const Pack<Src, kWidth>*>(src);
  const int32_t packs = numel / kWidth;
  int32_t p = lane;
  for (; p + (kRound - 1) * kThreads < packs; p += kRound * kThreads) {
    move_round<kRound, kWidth>(dst_packs, src_packs, p, op);
  }
  for (; p < packs; p += kThreads) move_round<1, kWidth>(dst_packs, src_packs, p, op);
  for (int32_t i = packs * kWidth + lane; i < numel; i += kThreads) dst[i] = op(src[i], dst[i]);
}

// Uses 16-byte accesses on the wider side if both sides are aligned for it, else one element at a
// time.
template <typename Dst, typename Src, typename Op>
TRIREME_HOST_DEVICE void move_elements(Dst* dst, const Src* src, int32_t numel, int32_t lane,
                                       const Op& op) {
  constexpr int kWidth = 16 / (sizeof(Dst) > sizeof(Src) ? sizeof(Dst) : sizeof(Src));
  const bool aligned = reinterpret_cast<uintptr_t>(dst) % alignof(Pack<Dst, kWidth>) == 0 &&
                       reinterpret_cast<uintptr_t>(src) % alignof(Pack<Src, kWidth>) == 0;
  if (aligned) {
    move_packs<kWidth>(dst, src, numel, lane, op);
  } else {
    move_packs<1>(dst, src, numel, lane, op);
  }
}

}  // namespace trireme::cuda

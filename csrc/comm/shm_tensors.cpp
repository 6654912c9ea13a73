#include <trireme/comm/shm_tensors.h>

#include <trireme/common/resolved.h>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace trireme {
namespace {

shm::Piece piece_of(const at::Tensor& flat, int64_t begin, int64_t numel) {
  const auto element = static_cast<int64_t>(flat.element_size());
  return {static_cast<std::byte*>(flat.data_ptr()) + begin * element, numel * element};
}

// A run of the caller's bytes, and its place among the bytes of a rank.
struct Run {
  const std::byte* begin;
  const std::byte* end;
  size_t rank;
  int64_t offset;
};

std::vector<Run> runs_of(const std::vector<shm::Pieces>& by_rank) {
  std::vector<Run> runs;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    by_rank[rank].visit(0, by_rank[rank].bytes(),
                        [&](const std::byte* data, int64_t offset, int64_t bytes) {
                          runs.push_back({data, data + bytes, rank, offset});
                        });
  }
  return runs;
}

}  // namespace

shm::Dtype shm_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
      return shm::Dtype::kBool;
    case at::kByte:
      return shm::Dtype::kU8;
    case at::kChar:
      return shm::Dtype::kI8;
    case at::kUInt16:
      return shm::Dtype::kU16;
    case at::kShort:
      return shm::Dtype::kI16;
    case at::kUInt32:
      return shm::Dtype::kU32;
    case at::kInt:
      return shm::Dtype::kI32;
    case at::kUInt64:
      return shm::Dtype::kU64;
    case at::kLong:
      return shm::Dtype::kI64;
    case at::kHalf:
      return shm::Dtype::kF16;
    case at::kBFloat16:
      return shm::Dtype::kBF16;
    case at::kFloat:
      return shm::Dtype::kF32;
    case at::kDouble:
      return shm::Dtype::kF64;
    case at::kComplexFloat:
      return shm::Dtype::kComplexF32;
    case at::kComplexDouble:
      return shm::Dtype::kComplexF64;
    case at::kFloat8_e4m3fn:
      return shm::Dtype::kF8E4M3;
    case at::kFloat8_e5m2:
      return shm::Dtype::kF8E5M2;
    case at::kFloat8_e4m3fnuz:
      return shm::Dtype::kF8E4M3Nuz;
    case at::kFloat8_e5m2fnuz:
      return shm::Dtype::kF8E5M2Nuz;
    case at::kFloat8_e8m0fnu:
      return shm::Dtype::kF8E8M0;
    default:
      return shm::Dtype::kBytes;
  }
}

ShmTensors::ShmTensors(std::vector<at::Tensor> tensors, Use use)
    : tensors_(std::move(tensors)), use_(use) {
  for (const at::Tensor& tensor : tensors_) {
    if (lies_plain(tensor)) {
      flat_.push_back(tensor);
    } else if (use == Use::kWrite) {
      flat_.push_back(at::empty(tensor.sizes(), tensor.options()));
    } else {
      flat_.push_back(resolved(tensor.detach()).contiguous());
    }
  }
  if (use == Use::kReadWrite && tensors_.size() > 1 && would_read_results({pieces()}, {pieces()}))
    make_copies();
}

bool would_read_results(const std::vector<shm::Pieces>& outputs,
                        const std::vector<shm::Pieces>& inputs) {
  std::vector<Run> written = runs_of(outputs);
  if (written.empty()) return false;
  std::sort(written.begin(), written.end(),
            [](const Run& a, const Run& b) { return a.begin < b.begin; });
  std::vector<const std::byte*> furthest;  // the furthest end of the runs up to each
  for (const Run& run : written)
    furthest.push_back(furthest.empty() ? run.end : std::max(furthest.back(), run.end));
  for (const Run& read : runs_of(inputs)) {
    const auto first = std::upper_bound(furthest.begin(), furthest.end(), read.begin);
    for (auto index = static_cast<size_t>(first - furthest.begin());
         index < written.size() && written[index].begin < read.end; ++index) {
      const Run& run = written[index];
      const bool apart = run.end <= read.begin;
      const bool in_place =
          run.rank == read.rank && run.begin - run.offset == read.begin - read.offset;
      if (!apart && !in_place) return true;
    }
  }
  return false;
}

shm::Pieces ShmTensors::pieces() const {
  shm::Pieces all;
  for (const at::Tensor& flat : flat_) all.add(piece_of(flat, 0, flat.numel()));
  return all;
}

std::vector<shm::Pieces> ShmTensors::pieces_of_each() const {
  std::vector<shm::Pieces> each(flat_.size());
  for (size_t i = 0; i < flat_.size(); ++i) each[i].add(piece_of(flat_[i], 0, flat_[i].numel()));
  return each;
}

std::vector<shm::Pieces> ShmTensors::ranges(const std::vector<int64_t>& numels) const {
  std::vector<shm::Pieces> ranges(numels.size());
  int64_t begin = 0;
  for (size_t i = 0; i < numels.size(); ++i) {
    ranges[i].add(piece_of(flat_.front(), begin, numels[i]));
    begin += numels[i];
  }
  return ranges;
}

void ShmTensors::add_parts(std::vector<shm::Pieces>& by_rank) const {
  const int64_t numel = flat_.front().numel() / static_cast<int64_t>(by_rank.size());
  for (size_t rank = 0; rank < by_rank.size(); ++rank)
    by_rank[rank].add(piece_of(flat_.front(), static_cast<int64_t>(rank) * numel, numel));
}

void ShmTensors::make_copies() {
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (flat_[i].is_same(tensors_[i])) flat_[i] = tensors_[i].detach().clone();
}

void ShmTensors::write_back() {
  if (use_ == Use::kRead) return;
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!flat_[i].is_same(tensors_[i])) copy_over(tensors_[i], flat_[i]);
}

void copy_over(const at::Tensor& to, const at::Tensor& from) {
  std::optional<c10::InferenceMode> mode;
  if (to.is_inference()) mode.emplace();
  to.copy_(from);
}

}  // namespace trireme

#include <trireme/grad/run_bucket.h>

#include <trireme/common/sole_reference.h>
#include <trireme/kernels/flatten.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/memory/flat_buffer.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace trireme {

RunBucket::RunBucket(PlannedBucket plan, const std::vector<at::Tensor>& parameters,
                     const std::vector<ParameterInfo>& infos, OwnShards own,
                     std::shared_ptr<BufferPool> pool)
    : Bucket(std::move(plan), parameters, infos, /*tail_numel=*/0, std::move(own)),
      pool_(std::move(pool)) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Run run{run_numel_};
    for (int64_t rank = 0; rank < own_.plan->world; ++rank)
      run.numel = std::max(run.numel, part_of(i, rank).numel);
    run_numel_ += run.numel;
    runs_.push_back(run);
  }
}

void RunBucket::begin_step(bool shadow) {
  Bucket::begin_step(shadow);
  buffer_.reset();
  sums_.reset();
  if (whole_.defined() && !is_sole_reference(whole_)) whole_.reset();
}

void RunBucket::allocate() {
  buffer_ = pool_->empty({own_.plan->world * run_numel_}, plan_.dtype, "gradients");
  for (size_t i = 0; i < slots_.size(); ++i) {  // padding is summed up, too
    for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
      const int64_t numel = part_of(i, rank).numel;
      const int64_t padding = runs_[i].numel - numel;
      if (padding > 0)
        buffer_.narrow(0, rank * run_numel_ + runs_[i].offset + numel, padding).zero_();
    }
  }
}

void RunBucket::have_home() {
  if (!whole_.defined()) whole_ = lazy_zeros(plan_.numel, plan_.dtype, plan_.device);
}

ShardRange RunBucket::part_of(size_t slot, int64_t rank) const {
  return own_.plan->of(plan_.slots[slot].parameter, rank);
}

const at::Tensor& RunBucket::sums() {
  if (!sums_.defined()) sums_ = at::empty({run_numel_}, buffer_.options());
  return sums_;
}

std::vector<at::Tensor> RunBucket::sums_of(const std::vector<bool>& chosen) {
  std::vector<at::Tensor> found;
  int64_t begin = 0;
  int64_t end = 0;  // end of neighbours
  const auto add = [&] {
    if (end > begin) found.push_back(sums().narrow(0, begin, end - begin));
  };
  for (size_t i = 0; i < runs_.size(); ++i) {
    if (!chosen[i]) continue;
    if (runs_[i].offset != end) {
      add();
      begin = runs_[i].offset;
    }
    end = runs_[i].offset + runs_[i].numel;
  }
  add();
  return found;
}

void RunBucket::write(size_t index, const at::Tensor& grad, Write how) {
  if (plan_.slots[index].numel == 0) return;
  if (!buffer_.defined()) allocate();
  const at::Tensor dense = arranged(grad, slots_[index]);
  for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
    const ShardRange part = part_of(index, rank);
    if (part.numel > 0) write_range(rank * run_numel_ + runs_[index].offset, dense, part, how);
  }
}

void RunBucket::complete(double scale) {
  if (!buffer_.defined()) allocate();
  if (!plan_.device.is_cpu()) {
    flatten(runs_on_device(), buffer_, scale);
  } else {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor grad = contribution(i);
      if (!slots_[i].packed && grad.defined()) {
        write(i, grad, {scale, /*add=*/false});
      } else if (!slots_[i].packed) {
        buffer_.view({own_.plan->world, run_numel_})
            .narrow(1, runs_[i].offset, runs_[i].numel)
            .zero_();
      }
    }
  }
  for (Slot& slot : slots_) slot.packed = true;
  drop_taken();
}

// Returns the pieces that one launch copies for the whole bucket.
std::vector<at::Tensor> RunBucket::runs_on_device() {
  std::vector<at::Tensor> flat;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor grad = contribution(i);
    const int64_t numel = plan_.slots[i].numel;
    if (!grad.defined()) {
      flat.push_back(at::zeros({numel}, buffer_.options()));
      continue;
    }
    flat.push_back(arranged(grad, slots_[i]).as_strided({numel}, {1}));
  }
  std::vector<at::Tensor> sources;
  for (int64_t rank = 0; rank < own_.plan->world; ++rank) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const ShardRange part = part_of(i, rank);
      sources.push_back(flat[i].narrow(0, part.begin, part.numel));
      const int64_t padding = runs_[i].numel - part.numel;
      if (padding > 0) sources.push_back(at::zeros({padding}, buffer_.options()));
    }
  }
  return sources;
}

Pending RunBucket::reduce(Communicator& ranks, const std::string& label) {
  return ranks.reduce_scatter({sums()}, {buffer_}, ReduceOp::kSum, label);
}

at::Tensor RunBucket::spread_sum(size_t slot) {
  have_home();
  at::Tensor whole = range(slot);
  own_part(whole, slot).copy_(Bucket::own_sum(slot));
  return whole;
}

at::Tensor RunBucket::own_sum(size_t slot, at::IntArrayRef sizes, at::IntArrayRef strides) const {
  return range_of(sums_, sizes, strides, runs_[slot].offset);
}

}  // namespace trireme

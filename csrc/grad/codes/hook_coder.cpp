#include <trireme/grad/codes/hook_coder.h>

#include <ATen/ATen.h>

#include <utility>

namespace trireme {

HookCoder::HookCoder(std::shared_ptr<Communicator> ranks, const Compression& compression)
    : ranks_(std::move(ranks)) {
  check(compression);
  check_same_compression(*ranks_, compression);
  if (has_several_senders(*ranks_, between(compression)))
    coder_ = std::make_unique<GradientCoder>(ranks_, compression);
}

void HookCoder::average(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
                        const std::vector<std::string>& names, int64_t index) {
  const std::string label = "bucket " + std::to_string(index) + ": " + names.front();
  const double scale = 1.0 / static_cast<double>(ranks_->world());
  if (!coder_) {
    buffer.mul_(scale);
    return ranks_->all_reduce({buffer}, ReduceOp::kSum, label).wait();
  }
  if (index == 0) coder_->begin_step();
  CodedBucket bucket{buffer, {}, scale, label};
  int64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    bucket.parameters.push_back({parameter, names[i], parameter.sizes(), parameter.numel(),
                                 static_cast<int64_t>(i), offset});
    offset += parameter.numel();
  }
  coder_->code(bucket).wait();
}

}  // namespace trireme

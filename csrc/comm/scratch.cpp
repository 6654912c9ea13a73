#include <trireme/comm/scratch.h>

#include <trireme/common/sole_reference.h>

#include <ATen/ATen.h>

#include <algorithm>

namespace trireme {

at::Tensor Scratch::take_buffer(int64_t bytes) {
  const auto fits = [&](const at::Tensor& buffer) {
    return is_sole_reference(buffer) && buffer.numel() >= bytes && buffer.numel() / 2 <= bytes;
  };
  auto found = std::find_if(kept_.begin(), kept_.end(), fits);
  if (found == kept_.end()) {
    const at::Tensor made = at::empty({bytes}, at::kByte);
    found = std::find_if(kept_.begin(), kept_.end(), is_sole_reference);
    if (found == kept_.end() && kept_.size() == kKept) return made;
    found == kept_.end() ? void(found = kept_.insert(found, made)) : void(*found = made);
  }
  return found->narrow(0, 0, bytes);
}

}  // namespace trireme

#include <trireme/comm/scratch.h>

#include <ATen/ATen.h>

#include <algorithm>

namespace trireme {

at::Tensor Scratch::take_buffer(int64_t bytes) {
  const auto is_free = [](const at::Tensor& buffer) { return buffer.storage().use_count() == 1; };
  const auto fits = [&](const at::Tensor& buffer) {
    return is_free(buffer) && buffer.numel() >= bytes && buffer.numel() / 2 <= bytes;
  };
  auto found = std::find_if(kept_.begin(), kept_.end(), fits);
  if (found == kept_.end()) {
    const at::Tensor made = at::empty({bytes}, at::kByte);
    found = std::find_if(kept_.begin(), kept_.end(), is_free);
    if (found == kept_.end() && kept_.size() == kKept) return made;
    found == kept_.end() ? void(found = kept_.insert(found, made)) : void(*found = made);
  }
  return found->narrow(0, 0, bytes);
}

}  // namespace trireme

#include <trireme/grad/codes/code_memory.h>

#include <trireme/common/sole_reference.h>

#include <ATen/ATen.h>

#include <algorithm>

namespace trireme {

at::Tensor CodeMemory::take(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  Entry* best = nullptr;
  for (Entry& entry : entries_) {
    if (entry.bytes.numel() < bytes || !is_sole_reference(entry.bytes)) continue;
    if (best == nullptr || entry.bytes.numel() < best->bytes.numel()) best = &entry;
  }
  if (best == nullptr) best = &entries_.emplace_back(Entry{at::empty({bytes}, at::kByte)});
  best->is_used = true;
  return best->bytes.narrow(0, 0, bytes).view(dtype);
}

void CodeMemory::forget_unused() {
  std::erase_if(entries_, [](const Entry& entry) {
    return !entry.is_used && is_sole_reference(entry.bytes);
  });
  for (Entry& entry : entries_) entry.is_used = false;
}

}  // namespace trireme

#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <stdexcept>
#include <sys/mman.h>

namespace trireme::test {

// A tensor of bytes of which only the first part can be written. Gloo, receiving into it, closes
// the connection in the middle of the message, as if the sender had died then; and by itself lets
// both ranks wait for as long as their timeout says.
class HalfWritable {
 public:
  static constexpr int64_t kBytes = 128 << 20;  // more than a connection holds
  HalfWritable() {
    constexpr size_t kWritable = 16 << 20;
    if (memory_ == MAP_FAILED || ::mprotect(memory_, kWritable, PROT_READ | PROT_WRITE) != 0)
      throw std::runtime_error("no memory for a test");
  }
  ~HalfWritable() { ::munmap(memory_, kBytes); }
  HalfWritable(const HalfWritable&) = delete;
  HalfWritable& operator=(const HalfWritable&) = delete;

  at::Tensor tensor() const { return at::from_blob(memory_, {kBytes}, at::kByte); }

 private:
  void* memory_ = ::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
};

}  // namespace trireme::test

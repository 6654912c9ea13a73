#include <trireme/kernels/cuda_library.h>

#include <catch_torch.h>
#include <fstream>
#include <string>

namespace trireme::cuda_library_test {

namespace {

using namespace trireme::cuda;

bool maps_the_kernels() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libtrireme_cuda-") != std::string::npos) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("the library of CUDA kernels is opened when they are asked for") {
  CHECK_FALSE(maps_the_kernels());
  const bool are_there = cuda_kernels() != nullptr;
  CHECK(maps_the_kernels() == are_there);
}

TEST_CASE("the library of CUDA kernels offers all of them, or it is said why there is none") {
  const CudaKernels* kernels = cuda_kernels();
  if (kernels == nullptr) {
    const std::string reason = why_no_cuda(&CudaKernels::why_no_flatten);
    CHECK(reason.find("libtrireme_cuda-") != std::string::npos);
    CHECK(reason == why_no_cuda(&CudaKernels::why_no_optimizer_step));
    return;
  }
  CHECK(kernels->why_no_flatten != nullptr);
  CHECK(kernels->launch_flatten != nullptr);
  CHECK(kernels->why_no_optimizer_step != nullptr);
  CHECK(kernels->launch_adam != nullptr);
  CHECK(kernels->launch_sgd != nullptr);
  // A table without tensors launches nothing, so it needs no GPU.
  FlattenTable table;
  clear(table, 0);
  CHECK(kernels->launch_flatten(table, FlattenMove::kFlatten, nullptr) == nullptr);
}

}  // namespace trireme::cuda_library_test

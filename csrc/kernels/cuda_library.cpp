#include <trireme/kernels/cuda_library.h>

#include <trireme/common/sibling_library.h>

#include <string>

namespace trireme::cuda {
namespace {

struct Opened {
  const CudaKernels* kernels = nullptr;
  std::string why_not;
};

Opened open_kernels() {
  const SiblingSymbol symbol = find_in_sibling("cuda", kOfferCudaKernels);
  if (symbol.address == nullptr) {
    return {.kernels = nullptr,
            .why_not = "the library of CUDA kernels cannot be opened (" + symbol.why_not + ")"};
  }
  return {.kernels = reinterpret_cast<OfferCudaKernels*>(symbol.address)(), .why_not = {}};
}

const Opened& opened() {
  static const Opened* const once = new Opened(open_kernels());  // its text outlives every caller
  return *once;
}

}  // namespace

const CudaKernels* cuda_kernels() { return opened().kernels; }

const char* why_no_cuda(const char* (*CudaKernels::*ask)()) {
  const CudaKernels* kernels = cuda_kernels();
  return kernels != nullptr ? (kernels->*ask)() : opened().why_not.c_str();
}

}  // namespace trireme::cuda

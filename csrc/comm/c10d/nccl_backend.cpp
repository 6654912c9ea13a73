#include <trireme/comm/c10d/nccl_backend.h>

#include <trireme/comm/c10d/engine_options.h>
#include <trireme/common/sibling_library.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace trireme {
namespace {

template <typename Function>
Function* find_in_nccl_library(const char* name, RankOf where) {
  const SiblingSymbol symbol = find_in_sibling("nccl", name);
  if (symbol.address == nullptr) {
    C10_THROW_ERROR(
        ValueError,
        error_text("launch", "NCCL cannot be used from C++ here: " + symbol.why_not, where,
                   "Use the backend \"gloo\", or build Trireme against a torch with CUDA."));
  }
  return reinterpret_cast<Function*>(symbol.address);
}

}  // namespace

void load_nccl(RankOf where) { find_in_nccl_library<MakeNcclBackend>(kMakeNcclBackend, where); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const NcclRequest& request) {
  auto* const make = find_in_nccl_library<MakeNcclBackend>(kMakeNcclBackend, request.where);
  c10::intrusive_ptr<c10d::Backend> backend;
  make(request, backend);
  return backend;
}

EngineOptions copy_nccl_options(const EngineOptions& options, RankOf where) {
  auto* const make = find_in_nccl_library<CopyNcclOptions>(kCopyNcclOptions, where);
  EngineOptions copy;
  make(options, copy);
  return copy;
}

}  // namespace trireme

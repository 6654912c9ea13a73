#include <trireme/comm/nccl_backend.h>

#include <trireme/comm/engine_options.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <dlfcn.h>
#include <filesystem>
#include <string>

namespace trireme {
namespace {

// libtrireme<suffix>.so -> libtrireme_nccl<suffix>.so in the same folder, so that the two are of
// one build.
std::filesystem::path nccl_library_path() {
  Dl_info self{};
  TORCH_INTERNAL_ASSERT(dladdr(reinterpret_cast<const void*>(&make_nccl_backend), &self) != 0);
  const std::filesystem::path own(self.dli_fname);
  const std::string stem = "libtrireme";
  const std::string name = own.filename().string();
  return own.parent_path() / (stem + "_nccl" + name.substr(std::min(stem.size(), name.size())));
}

template <typename Function>
Function* find_in_nccl_library(const char* name, RankOf where) {
  void* library = dlopen(nccl_library_path().c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
  if (symbol == nullptr) {
    C10_THROW_ERROR(
        ValueError,
        error_text("launch", std::string("NCCL cannot be used from C++ here: ") + dlerror(), where,
                   "Use the backend \"gloo\", or build Trireme against a torch with CUDA."));
  }
  return reinterpret_cast<Function*>(symbol);
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

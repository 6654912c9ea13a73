#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace trireme {

struct NcclRequest {
  c10::intrusive_ptr<c10d::Store> store;  // carries no other group's keys
  RankOf where;
  std::chrono::milliseconds timeout;  // limit of one collective
};

// Loads NCCL from a library of its own beside this one, through which libtorch_cuda comes, which
// would cost a CPU program 0.3 s and 370 MB. Loading it again is free. Throws c10::ValueError with
// the next step when this build has none, or when it cannot be opened.
TRIREME_API void load_nccl(RankOf where);

// Makes torch's NCCL engine on the current CUDA device. Loads the library if need be.
TRIREME_API c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const NcclRequest& request);

// The function that the library exports; fills `backend`.
using MakeNcclBackend = void(const NcclRequest& request,
                             c10::intrusive_ptr<c10d::Backend>& backend);
inline constexpr const char* kMakeNcclBackend = "trireme_make_nccl_backend";

}  // namespace trireme

#pragma once

#include <trireme/common/error.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace trireme {

using EngineOptions = c10::intrusive_ptr<c10d::Backend::Options>;

// Copy the options of one engine, for torch 2.11, where they cannot copy themselves.
EngineOptions copy_gloo_options(const EngineOptions& options);
// Loads NCCL's library; throws what load_nccl() does.
EngineOptions copy_nccl_options(const EngineOptions& options, RankOf where);

// The function that NCCL's library exports for it; fills `copy`.
using CopyNcclOptions = void(const EngineOptions& options, EngineOptions& copy);
inline constexpr const char* kCopyNcclOptions = "trireme_copy_nccl_options";

}  // namespace trireme

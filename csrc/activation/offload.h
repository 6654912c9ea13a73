#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>

namespace trireme {

// [Note: what is offloaded]
//
// A saved tensor keeps its storage alive, so ranges of storages are moved: the range that a tensor
// fills, or the whole storage if the tensor has gaps, like a slice of columns. A range is copied
// once for all tensors that one use of checkpoint() saves of it at one version, and each of these
// comes back with its strides, over a copy of the range. These tensors stay where they are:
//
// * parameters, and views of them: their memory stays anyway, and fully_shard fills it again;
// * storages that outlived a graph for which they were offloaded. A frozen weight or a table is
//   copied in the first step, and is known from then on;
// * ranges below kLeastOffloadedBytes, and slices whose storage is more than 64 times as large;
// * sparse, quantized and nested tensors, and subclasses;
// * CPU tensors, if no folder is given.
//
// Tensors of an operator that has yet to write what it saves (see operator_watch.h) are offloaded
// when the next operator saves, or when the function is over.
//
// Device memory is copied to pinned memory on a side stream, and freed when the copy is done. A
// backward that unpacks the first tensor of a use of checkpoint() begins to copy back all tensors
// of this use and of the use before it. With a folder the device waits until its memory is written.
//
// Autograd does not check versions of tensors with hooks, so they are checked here, also for
// copies: the change may have come while the memory was copied.

// The destination of the tensors that autograd saves.
struct ActivationOffload {
  std::string folder;  // of unnamed files; empty: host memory
};

// The overhead of a system call and page faults, or of a device copy, is that of copying this much.
constexpr int64_t kLeastOffloadedBytes = 64 << 10;

// Makes the packer that offloads one use of checkpoint(). Throws ValueError if the folder does not
// exist. It throws c10::Error, out of the operator that saves a tensor, if there is no room.
TRIREME_API c10::intrusive_ptr<SavedTensorPacker> make_offload_packer(
    const ActivationOffload& offload);

// The bytes that this process has offloaded.
struct OffloadedBytes {
  int64_t now = 0;      // now offloaded
  int64_t written = 0;  // in total
};

TRIREME_API OffloadedBytes offloaded_bytes();

}  // namespace trireme

#pragma once

#include <trireme/activation/saved_tensor_hooks.h>
#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>

namespace trireme {

// [Note: what is offloaded]
//
// What a saved tensor keeps alive is its storage, so memory is moved by ranges of storages: the one
// that a tensor fills, or all of a storage where the tensor has gaps, as a slice of columns has. A
// range is copied once for all tensors that a use saves of it at one version, and each of these
// comes back with its strides, over a range like that. These stay where they are:
//
// * parameters, and views of them: their memory is there anyway, and fully_shard fills it again;
// * what outlived a graph that it had been offloaded for. A frozen weight or a table is copied in
//   the first step, and is known from then on;
// * ranges below kLeastOffloadedBytes, and slices so thin that their storage would be the copy;
// * what is more than a plain tensor: sparse, quantized or nested ones, and subclasses;
// * tensors of the CPU, where there is no folder.
//
// An operator that has yet to write what it saves (see operator_watch.h) ends first: its tensors
// leave when the next operator saves, or when the function is over.
//
// From a device memory is copied to pinned memory beside what is computed, and goes when that is
// done. A backward that comes to the first tensor of a use of checkpoint() begins to bring back all
// of this use and of the use before. With a folder the device waits until its memory is written.
//
// Autograd does not check versions where hooks are, so it is done here, also for copies: the change
// may have come while the memory was copied.

// Where what autograd saves goes.
struct ActivationOffload {
  std::string folder;  // to files without names in it; empty: to the memory of the host
};

// A system call and page faults, or a copy from a device, take as long as copying this much.
constexpr int64_t kLeastOffloadedBytes = 64 << 10;

// Makes what offloads one use of checkpoint(). Throws ValueError where there is no such folder. It
// throws c10::Error, out of the operator that saves a tensor, where there is no room.
TRIREME_API c10::intrusive_ptr<TensorPacker> make_offload_packer(const ActivationOffload& offload);

// Bytes of this process.
struct OffloadedBytes {
  int64_t now = 0;      // that lie elsewhere
  int64_t written = 0;  // in all
};

TRIREME_API OffloadedBytes offloaded_bytes();

}  // namespace trireme

#pragma once

#include <trireme/shm/segment.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

namespace trireme {

// Returns an allocator of CPU memory that other processes can map (ShmWindow): anonymous segments,
// reserved when they are made. No segment outlives the processes that map it. Freed memory is kept
// for the next tensors, up to 256 MiB per process, because to reserve pages costs as much as to
// fill them. In a forked child it is the parent's memory, not a copy: the parent sees what the
// child writes.
//
// There is one per process, never destroyed, thread-safe. allocate() throws c10::DistBackendError,
// saying how much is needed and how much is free.
std::shared_ptr<c10::Allocator> shm_allocator();

// Returns the segment that a tensor of that allocator lies in; null if it lies elsewhere.
std::shared_ptr<const shm::Segment> segment_of(const at::Tensor& tensor);

}  // namespace trireme

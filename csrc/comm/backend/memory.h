#pragma once

#include <trireme/shm/segment.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

namespace trireme {

// Gives memory of CPU tensors that other processes can map (ShmWindow): anonymous segments,
// reserved when they are made. Nothing of it outlives the processes that map it. What tensors give
// back is kept for the next ones, up to 256 MiB per process, because to reserve pages costs as much
// as to fill them. In a forked child it is the parent's, not a copy: what the child writes the
// parent sees.
//
// One per process, never destroyed, thread-safe. allocate() throws c10::DistBackendError, saying
// what is needed and what is free.
std::shared_ptr<c10::Allocator> shm_allocator();

// Returns the segment that a tensor of that allocator lies in; null if it lies elsewhere.
std::shared_ptr<const shm::Segment> segment_of(const at::Tensor& tensor);

}  // namespace trireme

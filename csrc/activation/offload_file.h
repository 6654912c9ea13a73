#pragma once

#include <trireme/common/export.h>

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace trireme {

// [Note: files of offloaded memory]
//
// Each thread appends to a file that has no name, which takes kOffloadFileBytes or one larger
// piece; then comes the next. What was written is read where the file is mapped. A file is gone
// with the last of its pieces, also when the process is killed.
//
// * Pieces are written by pwrite: where the disk is full that returns an error, and a write to
//   mapped memory would end the process by a signal.
// * What was written does not change, and its place is not used for another piece. So a child of
//   fork() may read what its parent has written, even after the parent has let it go, as it may
//   read the parent's memory. It appends to files of its own.
// * A piece begins on a page of its own. The mapping is private: what a program writes to such
//   memory stays in that piece, in that process.

constexpr size_t kOffloadFileBytes = size_t{64} << 20;

// Writes bytes to a file in `folder`; returns them as memory of the CPU, which holds the file.
// Throws c10::Error where they cannot be written, with the bytes that are free there.
TRIREME_API c10::Storage write_offloaded(const std::string& folder, const void* data, size_t bytes);

// Tells the system that what write_offloaded() returned is read soon; waits for nothing.
TRIREME_API void read_ahead(const c10::Storage& written);

}  // namespace trireme

#pragma once

#include <trireme/common/export.h>

#include <c10/core/Storage.h>

#include <cstddef>
#include <string>

namespace trireme {

// [Note: files of offloaded memory]
//
// Each thread appends pieces to an unnamed file of kOffloadFileBytes, or of one larger piece, and
// makes another one when it is full. Pieces are read through a mapping of the file. A file is
// deleted with the last of its pieces, also when the process is killed.
//
// * Pieces are written by pwrite: on a full disk that returns an error, where a write to mapped
//   memory would kill the process by a signal.
// * A written piece does not change, and its place is not used for another piece. So a child of
//   fork() may read what its parent has written, even after the parent has dropped it, as with the
//   parent's memory. The child appends to files of its own.
// * A piece begins on a page of its own. The mapping is private: what a program writes to such
//   memory stays in that piece, in that process.

constexpr size_t kOffloadFileBytes = size_t{64} << 20;

// Writes bytes to a file in `folder` and returns them as CPU memory, which keeps the file alive.
// Throws c10::Error if they cannot be written, naming the bytes that are free there.
TRIREME_API c10::Storage write_offloaded(const std::string& folder, const void* data, size_t bytes);

// Tells the system that a result of write_offloaded() is read soon; does not wait.
TRIREME_API void read_ahead(const c10::Storage& written);

}  // namespace trireme

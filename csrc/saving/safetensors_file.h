#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

class ChunkHasher;

// The place of a tensor in a file of the safetensors format: 8 bytes with the length of a JSON
// text, that text, the tensors' bytes, row-major and little-endian
// (https://github.com/huggingface/safetensors#format).
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  int64_t begin = 0;  // in bytes, from the end of the header

  TRIREME_API int64_t numel() const;
  TRIREME_API int64_t bytes() const;
  bool operator==(const SafetensorsEntry&) const = default;
};

// The header: the content of the JSON text.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in the order of their bytes
  std::map<std::string, std::string> metadata;  // free texts of the writer
  int64_t bytes = 0;                            // of the header, its length included
  int64_t file_bytes = 0;                       // of the whole file

  bool operator==(const SafetensorsHeader&) const = default;
};

// Returns the format's name of a dtype ("F32"); empty if it has none.
TRIREME_API std::string safetensors_dtype(at::ScalarType dtype);

// Returns a tensor's name as written in the header, where "__metadata__" is reserved: that name,
// also after dots, gets a dot in front. All others stay.
TRIREME_API std::string to_safetensors_name(const std::string& name);
TRIREME_API std::string from_safetensors_name(const std::string& written);

// Lays tensors out, wide elements first, so that each is aligned. Ignores `begin` of `entries`.
TRIREME_API SafetensorsHeader plan_safetensors(std::vector<SafetensorsEntry> entries,
                                               std::map<std::string, std::string> metadata);

// Returns the first bytes of a file with this header: all that come before the tensors' bytes.
TRIREME_API std::string header_bytes(const SafetensorsHeader& header);

// One holder's part of a tensor: [first[d], first[d] + values.size(d)) of each dimension d. Empty
// `first`: zero in all dimensions. Undefined `values`: no part.
struct TensorPart {
  at::Tensor values;
  std::vector<int64_t> first = {};
};

// A file that several processes write or read at once, each the bytes of its parts. Parts that are
// contiguous CPU tensors go straight between memory and file; others take one copy of the part.
// Reading is spread over the intra-op threads of the caller.
//
// Throws ValueError for a file of another content, c10::Error for errors of the system; `where` is
// only for messages. One thread at a time.
class TRIREME_API SafetensorsFile {
 public:
  // Makes a file with its header and room for its tensors; it must not exist yet.
  static SafetensorsFile create(std::string path, SafetensorsHeader header, RankOf where);
  // Opens a file for writing that create() made from the same header.
  static SafetensorsFile open_to_write(std::string path, SafetensorsHeader header, RankOf where);
  // Opens a file for reading. The header is checked against the size of the file.
  static SafetensorsFile open(std::string path, RankOf where);

  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const SafetensorsHeader& header() const { return header_; }

  // `hasher`, if there is one, is told what is written.
  void write(const SafetensorsEntry& entry, const TensorPart& part,
             ChunkHasher* hasher = nullptr) const;
  // Writes bytes of a part from its byte `begin` on, in its row-major order.
  void write_some(const SafetensorsEntry& entry, const TensorPart& part, int64_t begin,
                  std::string_view bytes, ChunkHasher* hasher) const;
  // Reads in place, without autograd, and bumps the version of `part.values`. Values of another
  // dtype than the file's are cast, through a copy of the part.
  void read(const SafetensorsEntry& entry, const TensorPart& part) const;
  // Waits until all written bytes are on the disk.
  void sync() const;
  // Returns the checksum of bytes [begin, end) of the file. Thread-safe.
  uint64_t checksum(int64_t begin, int64_t end) const;
  const std::string& path() const { return path_; }

 private:
  SafetensorsFile(std::string path, int descriptor, RankOf where);
  void read_header();
  void check_entries(int64_t data_bytes) const;
  // The runs of a part: pieces contiguous in the file. In memory they follow each other.
  struct Runs {
    struct Dim {
      int64_t numel = 0;
      int64_t stride = 0;  // in bytes of the file
    };
    int64_t numel = 0;
    int64_t bytes = 0;      // bytes of each run
    int64_t begin = 0;      // the first run's offset in the file
    std::vector<Dim> dims;  // dimensions that index runs, innermost first
    int64_t begin_of(int64_t run) const;
    // Calls visit(done, bytes, offset) for the pieces of bytes [begin, end) of the part that are
    // contiguous in the file: they are `bytes` from `done` on, at `offset`.
    template <typename Visit>
    void for_each_piece(int64_t begin, int64_t end, const Visit& visit) const;
  };
  Runs runs_of(const SafetensorsEntry& entry, const TensorPart& part) const;
  void read_runs(char* part, const Runs& runs) const;
  void write_bytes(const char* data, int64_t bytes, int64_t offset) const;
  void read_bytes(char* data, int64_t bytes, int64_t offset) const;
  [[noreturn]] void fail(const std::string& doing) const;  // the reason is in errno
  [[noreturn]] void refuse(const std::string& got) const;

  std::string path_;
  int descriptor_ = -1;
  RankOf where_;
  SafetensorsHeader header_;
};

}  // namespace trireme

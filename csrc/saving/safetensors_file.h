#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// Says where a tensor lies in a file of the safetensors format: 8 bytes with the length of a JSON
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

// Holds what the text says.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        // in the order of their bytes
  std::map<std::string, std::string> metadata;  // texts, whatever a writer likes to say
  int64_t bytes = 0;                            // bytes of the header, its length included
  int64_t file_bytes = 0;                       // bytes of the whole file

  bool operator==(const SafetensorsHeader&) const = default;
};

// Returns the format's word for a dtype ("F32"); empty where it has none.
TRIREME_API std::string safetensors_dtype(at::ScalarType dtype);

// Returns a tensor's name as it is in the text. There "__metadata__" is no tensor's, so one that is
// called so gets a dot in front, as does one that is called so after dots; all others stay.
TRIREME_API std::string to_safetensors_name(const std::string& name);
TRIREME_API std::string from_safetensors_name(const std::string& written);

// Lays tensors out: those of wide elements first, so that each is aligned. `begin` is not read.
TRIREME_API SafetensorsHeader plan_safetensors(std::vector<SafetensorsEntry> entries,
                                               std::map<std::string, std::string> metadata);

// Is the part of a tensor that somebody has: of each dimension d [first[d], first[d] +
// values.size(d)). No `first`: from zero on along all of them. Undefined `values`: nothing.
struct TensorPart {
  at::Tensor values;
  std::vector<int64_t> first = {};
};

// Is a file that several processes write or read at once, each the bytes of its parts. Parts of
// contiguous CPU tensors go straight between memory and file; others take one copy of the part.
// Reading is spread over the intra-op threads of the caller.
//
// Throws ValueError for a file of another content, c10::Error where the system refuses; `where` is
// only for messages. One thread at a time.
class TRIREME_API SafetensorsFile {
 public:
  // Makes a file with its header, and room for its tensors; it must not exist yet.
  static SafetensorsFile create(std::string path, SafetensorsHeader header, RankOf where);
  // Opens a file for writing that create() made from the same header.
  static SafetensorsFile open_to_write(std::string path, SafetensorsHeader header, RankOf where);
  // Opens a file for reading. The header is checked against the size of the file.
  static SafetensorsFile open(std::string path, RankOf where);

  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const SafetensorsHeader& header() const { return header_; }

  void write(const SafetensorsEntry& entry, const TensorPart& part) const;
  // Reads in place, without autograd; the version of `part.values` is raised. Values of another
  // dtype than the file's are cast, a copy of the part in between.
  void read(const SafetensorsEntry& entry, const TensorPart& part) const;
  // Waits until what was written is on the disk.
  void sync() const;

 private:
  SafetensorsFile(std::string path, int descriptor, RankOf where);
  void read_header();
  void check_entries(int64_t data_bytes) const;
  // Names the pieces of a part that are one in memory, where they follow each other, and in the
  // file.
  struct Runs {
    struct Dim {
      int64_t numel = 0;
      int64_t stride = 0;  // in bytes of the file
    };
    int64_t numel = 0;
    int64_t bytes = 0;      // bytes of each
    int64_t begin = 0;      // place of the first, in the file
    std::vector<Dim> dims;  // that tell them apart, the innermost first
    int64_t begin_of(int64_t run) const;
  };
  Runs runs_of(const SafetensorsEntry& entry, const TensorPart& part) const;
  void read_runs(char* part, const Runs& runs) const;
  void write_bytes(const char* data, int64_t bytes, int64_t offset) const;
  void read_bytes(char* data, int64_t bytes, int64_t offset) const;
  [[noreturn]] void fail(const std::string& doing) const;  // errno says why
  [[noreturn]] void refuse(const std::string& got) const;

  std::string path_;
  int descriptor_ = -1;
  RankOf where_;
  SafetensorsHeader header_;
};

}  // namespace trireme

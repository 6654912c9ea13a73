#pragma once

#include <trireme/saving/checkpoint_source.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// How a checkpoint is read; the same on all ranks.
struct ReadOptions {
  // Whether of what several ranks need each element is read by one of them, which sends it to the
  // others, where else each rank reads it.
  bool once = false;
  Verify verify = Verify::kYes;
};

// An open checkpoint; see [Note: saving and loading without gathering] in checkpoint.h.
class TRIREME_API CheckpointReader final : public CheckpointSource {
 public:
  // Collective. Throws ValueError for an incomplete checkpoint, naming file and tensor, and for
  // indexes and texts whose bytes are not those that were saved.
  CheckpointReader(const std::string& path, CheckpointRanks ranks, const ReadOptions& options = {});

  bool has(const std::string& kind) const override;
  const std::map<std::string, CheckpointTensor>& tensors(const std::string& kind) const override;
  // Returns a text as it was saved.
  std::string text(const std::string& name) const override;
  // Each chunk is read and hashed by one of the ranks.
  void verify(const std::vector<std::string>& kinds) const override;
  void read(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const override;

 private:
  struct Place {
    size_t file = 0;
    size_t entry = 0;
  };
  struct Kind {
    std::vector<SafetensorsFile> files;
    std::map<std::string, Place> places;  // by name of the tensor
    std::map<std::string, CheckpointTensor> tensors;
    std::string save;
    int64_t chunk_bytes = 0;                       // 0: no checksums
    std::vector<std::vector<uint64_t>> checksums;  // by file
  };
  // A chunk of a file that has checksums.
  struct Chunk {
    const SafetensorsFile* file;
    int64_t begin, end;  // in bytes
    uint64_t checksum;
  };
  void open_all(const CheckpointPlace& place);
  CheckpointIndex index_of_one(const std::string& file) const;
  void check_others(const CheckpointIndex& model) const;
  int64_t bytes_of(const std::string& name, const std::string& holding) const;
  std::string text_at(const std::string& name, const CheckpointIndex& model) const;
  void open(const std::string& kind, const CheckpointIndex& index);
  SafetensorsFile open_file(const std::string& name, const CheckpointIndex& index) const;
  std::vector<Chunk> chunks_of(const std::vector<std::string>& kinds) const;
  void check_chunk(const Chunk& chunk) const;
  void take_file(Kind& opened, const CheckpointIndex& index, SafetensorsFile file,
                 const std::string& name) const;
  void compare_saves() const;
  std::string place() const override;
  void read_own(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;
  void read_once(const std::string& kind, const std::vector<CheckpointTensor>& tensors) const;

  std::string folder_;
  ReadOptions options_;
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::string> texts_;  // by file name
};

}  // namespace trireme

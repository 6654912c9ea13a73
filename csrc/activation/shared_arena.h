#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// [Note: blocks in the memory of a host]
//
// Ranks of a host put data that is equal on all of them once into memory that all of them map. Such
// blocks come and go with every step, and making memory takes a collective and fresh pages; so
// blocks lie in a few segments and are reused. One rank must choose their places, since each rank
// releases a block at its own time and would choose another place:
//
// * Rank 0 tracks the free memory and finds the place of the next block, which the caller sends to
//   the others.
// * A rank releases a block by one store into the block's head, from any thread, without waiting.
//   Rank 0 looks there when it needs room. A block stays until the last rank has released it.
//
// Blocks outlive the arena, the group and the other ranks.

// An allocator of memory that the ranks of one host share. One thread at a time, but for Block.
class TRIREME_API SharedArena {
 public:
  // A run of bytes that all ranks map, aligned to 64. This rank releases it when it dies.
  // Thread-safe.
  class TRIREME_API Block {
   public:
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    std::byte* data() const { return data_; }

   private:
    friend class SharedArena;
    struct Mapping;
    Block(std::shared_ptr<const Mapping> mapping, std::atomic<uint64_t>& released, std::byte* data,
          uint64_t number);

    std::shared_ptr<const Mapping> mapping_;
    std::atomic<uint64_t>& released_;  // this rank's counter in the head
    std::byte* data_;
    uint64_t number_;
  };

  // The place of a block to come, as integers that ranks can send each other.
  struct Place {
    int64_t slot = 0;
    int64_t offset = 0;
    int64_t bytes = 0;    // head included; 0: no block
    int64_t grows = 0;    // bytes of a new segment for it; 0: none
    int64_t dropped = 0;  // bits: slots whose free segments are unmapped first
  };

  // `communicator` outlives this; all of its ranks are on this host.
  explicit SharedArena(Communicator& communicator);

  // Finds a place for so many bytes, for rank 0. It reserves nothing: take() does.
  Place find_place(int64_t bytes);
  // Takes the place that rank 0 has found. Collective; `number` is above those of all earlier
  // blocks. Returns null on all ranks if the host has no memory; throws what a collective throws.
  std::shared_ptr<Block> take(const Place& place, uint64_t number, const std::string& label);

  // Returns the bytes of all segments, counted once for all ranks.
  int64_t bytes() const;

 private:
  // A segment; on rank 0 also its free runs, bytes by offset.
  struct Slot {
    std::shared_ptr<const Block::Mapping> mapping;
    std::map<int64_t, int64_t> free;
  };
  struct Used {
    Place place;
    uint64_t number;
  };

  std::atomic<uint64_t>* head_of(const Place& place) const;
  bool is_released(const Used& used) const;
  void give_back(const Place& place);

  Communicator& communicator_;
  RankOf where_;
  int64_t head_bytes_;  // a counter per rank: the number of the last block it released here
  std::vector<Slot> slots_;
  std::vector<Used> used_;  // on rank 0
};

}  // namespace trireme

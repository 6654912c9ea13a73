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
// Ranks of a host put what is equal on all of them once into memory that all of them map. Such
// blocks come and go with every step, and making memory takes a collective and fresh pages; so they
// lie in a few segments and are taken again. One rank must decide that, since each lets go of a
// block in its own time and would choose another place:
//
// * Rank 0 knows what is free, and finds the place of the next block. The others are told.
// * A rank lets go of a block by one store into the block's head, from any thread, and waits for
//   nobody. Rank 0 looks there when it needs room. Where one rank keeps its graph for longer, the
//   block stays for longer.
//
// Blocks outlive the arena, the group and the other ranks.

// Shares blocks of memory between the ranks of one host. One thread at a time, but for Block.
class TRIREME_API SharedArena {
 public:
  // Is a run of bytes that all ranks map, aligned to 64. This rank lets go of it when it dies.
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
    std::atomic<uint64_t>& released_;  // this rank's, in the head
    std::byte* data_;
    uint64_t number_;
  };

  // Says where a block is going to lie, in numbers that ranks can send each other.
  struct Place {
    int64_t slot = 0;
    int64_t offset = 0;
    int64_t bytes = 0;    // head included; none if there is no block
    int64_t grows = 0;    // bytes of a segment that is made for it
    int64_t dropped = 0;  // bits: slots whose segments, which are free, go before
  };

  // All ranks of the communicator, which outlives this, are on this host.
  explicit SharedArena(Communicator& communicator);

  // Finds a place for so many bytes, which is taken by take() or not at all. For rank 0.
  Place find_place(int64_t bytes);
  // Takes the place that rank 0 has found. Collective; `number` is above those of all earlier
  // blocks. Null on all ranks where the host has no memory; throws what a verb throws.
  std::shared_ptr<Block> take(const Place& place, uint64_t number, const std::string& label);

  // Returns the bytes that the host has given, once for all ranks.
  int64_t bytes() const;

 private:
  // Holds a segment; rank 0 also knows what is free in it, bytes by offset.
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
  int64_t head_bytes_;  // a counter per rank: the number of the last block that it let go here
  std::vector<Slot> slots_;
  std::vector<Used> used_;  // known to rank 0
};

}  // namespace trireme

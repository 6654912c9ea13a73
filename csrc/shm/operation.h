#pragma once

#include <trireme/shm/dtype.h>
#include <trireme/shm/reduce.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace trireme::shm {

enum class Verb : uint8_t {
  kNone,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kShare,    // share memory: a segment of each rank, or with a root one that it makes for all
  kDeposit,  // a round of deposits, see deposit_ring.h
  kRefused,  // a rank could not take part; `label` says why
};
std::string_view name(Verb verb);

// The properties of a collective that must be equal on all ranks that enter it.
struct Operation {
  Verb verb = Verb::kNone;
  Dtype dtype = Dtype::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int32_t root = -1;         // rank of the group; -1 where there is none
  int64_t count = 0;         // elements in all
  uint64_t shapes_hash = 0;  // hash of the numbers of elements per tensor, where they matter
  std::string_view label{};  // names the data in messages; empty if the caller has no name for it
  double factor = 1;         // factor of kPremulSum; each rank may have its own

  // Returns "all_reduce of 1024 float32 by sum 'bucket 3'".
  std::string to_string() const;
};

// One collective as a rank's segment shows it to its peers: the fingerprint they compare, and for
// some time afterwards its fate. Plain memory that only the owner writes, before it publishes the
// sequence number in RankBlock::entered.
struct Record {
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;  // hash of all that Operation holds, the whole label included
  int64_t count = 0;
  int32_t root = -1;
  Verb verb = Verb::kNone;
  Dtype dtype = Dtype::kBytes;
  ReduceOp op = ReduceOp::kSum;
  uint8_t label_length = 0;
  double factor = 1;                     // not compared
  int64_t started_ns = 0;                // CLOCK_MONOTONIC, which all processes of a host share
  std::atomic<int64_t> finished_ns = 0;  // 0 while it runs
  std::array<char, 64> label{};          // its first bytes

  void write(uint64_t sequence, const Operation& operation);
  Operation operation() const;
};

uint64_t mix(uint64_t hash, uint64_t value);  // for Operation::shapes_hash

// Returns " in step 10", " after step 9"; nothing if none has begun.
std::string step_text(uint64_t begun, uint64_t done);

// Returns how two ranks' operations differ ("rank 1 called broadcast of ..."), for both errors.
std::string describe_mismatch(int64_t rank, const Record& mine, int64_t peer, const Record& theirs);

}  // namespace trireme::shm

#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

namespace trireme {

// [Note: random numbers of replicas]
//
// A GPU has a generator of its own; all threads of a process share the CPU's, from which replicas
// would draw in whatever order they come. So in a replica on the CPU every ATen operator that takes
// a generator, and was given none or the CPU's, gets the replica's, which begins each forward with
// a seed made of one number that is drawn from the process's generator (torch.manual_seed) and of
// the number of the replica. The same seed gives the same bits in every run, whoever comes first.
//
// It works through a dispatch key that only threads of replicas include, in front of autograd;
// operators without a generator fall through it at no cost. ATen has no key for such things: this
// is DeferredInit, reserved for an out-of-tree package that was given up.
//
// trireme::checkpoint repeats a part of the forward with a copy of the replica's generator. Torch's
// repeats it with the state of the process's generator, which is not the one that the forward drew
// from: drawing in a backward throws.

// The random numbers of one forward. Thread-safe.
class TRIREME_API PassRandom {
 public:
  // Returns the number that was drawn from the process's generator the first time.
  uint64_t seed();

 private:
  std::mutex mutex_;
  std::optional<uint64_t> seed_;
};

// Makes random operators on the CPU that this thread calls draw for `replica` while it lives; in a
// backward (`pass` null) they throw NotImplementedError.
class TRIREME_API ReplicaRandomGuard {
 public:
  ReplicaRandomGuard(PassRandom* pass, size_t replica);
  // Makes operators draw from `generator`.
  explicit ReplicaRandomGuard(at::Generator generator);
  ~ReplicaRandomGuard();
  ReplicaRandomGuard(const ReplicaRandomGuard&) = delete;
  ReplicaRandomGuard& operator=(const ReplicaRandomGuard&) = delete;

  // Returns the innermost one of this thread, nullptr outside of replicas.
  static ReplicaRandomGuard* current();

  // Returns the generator that operators of this thread get. Throws in a backward.
  const at::Generator& generator();

 private:
  PassRandom* pass_;
  size_t replica_;
  at::Generator generator_;  // made when it is first needed
  ReplicaRandomGuard* outer_;
  bool included_;
};

}  // namespace trireme

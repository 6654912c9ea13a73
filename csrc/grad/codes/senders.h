#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/grad/codes/compression.h>
#include <trireme/memory/bucket_plan.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Who sends codes to whom, from where this rank is.
//
// The ranks of a host are one sender together. Its j-th ranks, as many as the smallest host has,
// are its legs (comm/hosts/host_layout.h): leg j codes the j-th part of each parameter and
// exchanges it with the legs j of other hosts. Where each rank sends for itself, it is a host of
// its own.
//
// Codes leave when the sum of a host is there, in the order of one coder's buckets. Buckets of
// several coders come in no common order, so each coder between hosts has communicators of its own.
struct Senders {
  int64_t count = 1;
  int64_t number = 0;  // this rank's
  int64_t legs = 1;
  int64_t leg = 0;  // this rank's; at least `legs` if it has none
  // Joins the legs of that number; null for a rank without one.
  std::shared_ptr<Communicator> between;
  // Join the ranks of this host, for sums before codes and means after them; null for a rank alone.
  std::shared_ptr<Communicator> inside = nullptr;
  std::shared_ptr<Communicator> spread = nullptr;
  // Tells its communicators apart from those of others over the same ranks; free for others again
  // when it is gone on all ranks. Null where each rank sends for itself.
  std::shared_ptr<const size_t> slot = nullptr;

  bool has_leg() const { return leg < legs; }
  void announce_failure(const std::string& text) const noexcept;
};

// Returns whether there is more than one sender among `ranks`. Rank 0 warns once if a method asks
// for hosts and there is one.
TRIREME_API bool has_several_senders(Communicator& ranks, Between between);
// Returns the senders, of which there are several. Collective.
TRIREME_API Senders make_senders(const std::shared_ptr<Communicator>& ranks, Between between);

// Throws ValueError on all ranks, naming both, if some compress in another way, or not at all.
// Collective: one gather of a number, and of texts where they differ.
TRIREME_API void check_same_compression(Communicator& communicator,
                                        const std::optional<Compression>& compression);

// Throws ValueError: there are no codes of sparse gradients, which that parameter has.
[[noreturn]] TRIREME_API void refuse_sparse(const std::string& parameter, RankOf where);
// Throws as refuse_sparse() for a parameter with sparse gradients.
TRIREME_API void check_compressible(const std::vector<ParameterInfo>& parameters, RankOf where);

}  // namespace trireme

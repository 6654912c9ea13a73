#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/saving/tensor_box.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace trireme {

// [Note: which rank sends what to which]
//
// Each rank says which part of each tensor it has, and which it needs. The plan follows from that
// alone, so all ranks make the same one:
//
//   - A rank copies what it has itself.
//   - Anything else comes from exactly one holder: one on the same host if there is one, and of
//     those the one that has least to send so far. What several holders have is cut into pieces,
//     so that all of them send.
//   - What several ranks of a host need and none of them has comes to the host once; the rank that
//     gets it forwards it.
//   - What all other ranks need is broadcast.

// The part that one rank has, or needs, of a tensor.
struct TensorPlace {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;         // sizes of the whole
  std::optional<TensorBox> box = {};  // no elements: none

  bool operator==(const TensorPlace&) const = default;
};

// The places of each rank, by rank.
using PlacesByRank = std::vector<std::vector<TensorPlace>>;

// The most bytes of a message, unless one element has more.
constexpr int64_t kMessageBytes = int64_t{16} << 20;

struct RedistributePlanRequest {
  const PlacesByRank& held;
  const PlacesByRank& needed;
  // The host of each rank, as any number that its ranks have in common; empty: all have one.
  std::vector<int64_t> hosts = {};
  // Tensors of which ranks may hold different values (buffers): the lowest holder's count.
  std::set<std::string> of_lowest = {};
  int64_t message_bytes = kMessageBytes;
};

// Which rank sends which parts to which ranks. It is a value: equal on all ranks.
struct RedistributePlan {
  struct Tensor {
    std::string name;
    at::ScalarType dtype = at::kFloat;
    std::vector<int64_t> sizes;
  };
  struct Piece {
    size_t tensor = 0;  // its index in `tensors`
    TensorBox box;
  };
  struct Message {
    int64_t from = 0;
    std::vector<int64_t> to;  // ascending
    std::vector<Piece> pieces;
    bool is_forwarded = false;  // its sender needs these pieces, too, and has received them before
  };

  int64_t world = 1;
  std::vector<Tensor> tensors;           // those that a rank needs, in the order in which they came
  std::vector<std::vector<Piece>> kept;  // by rank: what it needs and has
  std::vector<Message> messages;         // forwarded ones last; each rank follows this order

  // Returns the bytes of a piece or a message.
  TRIREME_API int64_t bytes_of(const Piece& piece) const;
  TRIREME_API int64_t bytes_of(const Message& message) const;
  // Returns "'weight'[0:2, 0:4] and 3 more".
  TRIREME_API std::string text_of(const std::vector<Piece>& pieces) const;
  // Returns one line per rank that keeps something and per message:
  //   rank 1 keeps 'weight'[2:4, 0:4]
  //   rank 0 -> 1, 2: 'bias'[0:4]
  //   rank 1 -> 3: 'bias'[0:4], forwarded
  TRIREME_API std::string text() const;
};

// Throws ValueError, on all ranks alike, for a tensor that ranks have in other sizes or as another
// dtype, and for elements that a rank needs and none holds; `where` is only for messages.
TRIREME_API RedistributePlan plan_redistribute(const RedistributePlanRequest& request,
                                               RankOf where);

// Returns which rank reads what from files, so that each element that a rank needs is read once, by
// one that needs it, and all ranks read about as many bytes. A tensor that ranks need as different
// dtypes is left out: its name is not in the result.
TRIREME_API PlacesByRank plan_reads(const PlacesByRank& needed,
                                    int64_t message_bytes = kMessageBytes);

}  // namespace trireme

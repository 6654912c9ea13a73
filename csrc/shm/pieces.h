#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace trireme::shm {

// A run of bytes of the caller's memory.
struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
};

// Memory in several places that a collective treats as one, in order: a list of tensors, without
// flattening it. Each piece has whole elements; the memory is borrowed.
class Pieces {
 public:
  Pieces() = default;
  Pieces(std::byte* data, int64_t bytes) { add({data, bytes}); }

  void add(Piece piece) {
    if (piece.bytes == 0) return;
    pieces_.push_back(piece);
    bytes_ += piece.bytes;
    ends_.push_back(bytes_);
  }

  int64_t bytes() const { return bytes_; }
  bool is_same(const Pieces& other) const {
    return pieces_.size() == other.pieces_.size() &&
           std::equal(pieces_.begin(), pieces_.end(), other.pieces_.begin(),
                      [](const Piece& a, const Piece& b) { return a.data == b.data; });
  }

  // Calls visit(memory, offset, length) for the parts of [begin, begin + length), in order, with
  // `offset` counted from `begin`.
  template <typename Visit>
  void visit(int64_t begin, int64_t length, Visit&& visit) const {
    auto index =
        static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t offset = 0; offset < length; ++index) {
      const int64_t skipped = begin + offset - (ends_[index] - pieces_[index].bytes);
      const int64_t part = std::min(pieces_[index].bytes - skipped, length - offset);
      visit(pieces_[index].data + skipped, offset, part);
      offset += part;
    }
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<int64_t> ends_;  // end of each piece, counted over all
  int64_t bytes_ = 0;
};

}  // namespace trireme::shm

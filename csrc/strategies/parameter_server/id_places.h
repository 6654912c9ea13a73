#pragma once

#include <trireme/common/export.h>

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme::ps {

// Spreads numbers that lie close together over 64 bits (the last steps of SplitMix64).
inline uint64_t hash_of(int64_t id) {
  auto x = static_cast<uint64_t>(id) + 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Numbers ids in the order of their first occurrence. Keeps its memory between uses.
class TRIREME_API IdPlaces {
 public:
  // Forgets all ids, and makes room for `most` ids; more must not come.
  void begin(int64_t most);
  // Returns the place of an id; `is_new` says whether it is new, and its place then size() - 1.
  int64_t place_of(int64_t id, bool& is_new) {
    size_t slot = hash_of(id) & mask_;
    for (; places_[slot] != 0; slot = (slot + 1) & mask_) {
      const int64_t place = places_[slot] - 1;
      is_new = false;
      if (ids_[static_cast<size_t>(place)] == id) return place;
    }
    is_new = true;
    ids_[static_cast<size_t>(count_)] = id;
    places_[slot] = ++count_;
    return count_ - 1;
  }
  int64_t size() const { return count_; }
  // Holds until the next begin().
  c10::IntArrayRef ids() const { return {ids_.data(), static_cast<size_t>(count_)}; }

 private:
  std::vector<int64_t> ids_;  // room for `most` at least, of which the first `count_` are known
  int64_t count_ = 0;
  std::vector<int64_t> places_;  // place + 1 by slot; 0: empty
  size_t mask_ = 0;
};

}  // namespace trireme::ps

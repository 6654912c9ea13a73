#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// The gathers of this rank, in order: a hash of all, by which ranks find that they have not
// gathered alike, and the last ones, by which they report what each did.
class TRIREME_API GatherLog {
 public:
  enum class Pass : uint8_t { kNone, kForward, kBackward };

  GatherLog() { last_.reserve(kKept); }

  void note(int64_t unit, Pass pass);
  // Returns the number of gathers; the first one is number 1.
  int64_t count() const { return count_; }
  // Returns a number of 24 bits.
  int64_t hash() const { return static_cast<int64_t>(hash_ & 0xffffff); }

  // Returns the last gathers, for other ranks to read.
  std::string text() const;
  // Returns where the texts of ranks first differ: "as gather 7, rank 0 gathered unit 'a' in a
  // forward, rank 1 unit 'b' in a backward". Empty texts are left out.
  static std::string difference(const std::vector<std::string>& texts,
                                const std::vector<std::string>& unit_names);

 private:
  static constexpr size_t kKept = 512;
  struct Gather {
    int64_t unit = 0;
    Pass pass = Pass::kNone;
  };
  std::vector<Gather> last_;  // a ring
  int64_t count_ = 0;
  uint64_t hash_ = 0;
};

}  // namespace trireme

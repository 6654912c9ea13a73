#pragma once

#include <trireme/common/export.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace trireme {

// A checksum of bytes that are told piece by piece: XXH3 of 64 bits, of the xxHash library. Its
// values are those of `xxhsum -H3`.
class TRIREME_API Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  // Begins anew, with no bytes.
  void reset();
  void add(std::string_view bytes);
  // Returns the checksum of the bytes so far.
  uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

TRIREME_API uint64_t checksum_of(std::string_view bytes);

// Return a checksum as 16 hexadecimal digits, and back; nothing for another text.
TRIREME_API std::string checksum_text(uint64_t checksum);
TRIREME_API std::optional<uint64_t> checksum_from(std::string_view text);

}  // namespace trireme

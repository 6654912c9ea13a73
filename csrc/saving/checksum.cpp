#include <trireme/saving/checksum.h>

#define XXH_INLINE_ALL
#include <charconv>
#include <cstdio>
#include <xxhash.h>

namespace trireme {

struct Checksum::State {
  XXH3_state_t xxh3;
};

Checksum::Checksum() : state_(std::make_unique<State>()) { reset(); }
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

void Checksum::reset() { XXH3_64bits_reset(&state_->xxh3); }

void Checksum::add(std::string_view bytes) {
  XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh3); }

uint64_t checksum_of(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

std::string checksum_text(uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

std::optional<uint64_t> checksum_from(std::string_view text) {
  uint64_t checksum = 0;
  const char* end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, checksum, 16);
  if (text.size() != 16 || error != std::errc() || read != end) return std::nullopt;
  // Other digits of the same number, such as 'A' for 'a', are a byte that has turned over.
  if (checksum_text(checksum) != text) return std::nullopt;
  return checksum;
}

}  // namespace trireme

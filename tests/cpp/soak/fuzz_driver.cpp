// What libFuzzer does, without its knowledge of what an input reaches: random inputs, and the seeds
// below with bytes changed, for a time.
//
//   fuzz_shm --seconds 20 [--seed N]      fuzz_shm FILE   an input that failed once
//
// An input is written to crash-input before it is tried, so that whatever happens leaves it behind.

#include <trireme/shm/byte_ring.h>
#include <trireme/shm/rank_block.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

Bytes bytes_of(uint8_t reader, std::string_view text) {
  Bytes bytes{reader};
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

std::string raw(const auto&... values) {
  std::string text;
  (text.append(reinterpret_cast<const char*>(&values), sizeof(values)), ...);
  return text;
}

// A message of 64 bytes with its header, as fuzz_shm.cpp's scribble() takes it.
std::string message(int64_t tag, int64_t bytes, uint64_t sequence, uint8_t dtype) {
  constexpr uint32_t kBehindBlock = sizeof(trireme::shm::ByteRingBlock);
  std::string header = raw(tag, bytes, sequence, dtype);
  return raw(uint16_t{128}, kBehindBlock, static_cast<uint8_t>(header.size())) + header;
}

std::vector<Bytes> seeds() {
  using std::string;
  const string pid = std::to_string(::getpid());
  const string address = "0 " + pid + " 5 4096 0123456789abcdef fedcba9876543210";
  std::vector<Bytes> found{
      bytes_of(0, address),
      bytes_of(0, "1 7 -1 9223372036854775807 0 0"),
      bytes_of(1, "7f0000000000-7f0000003000 rw-s 00000000 00:01 77   /memfd:trireme (deleted)"),
      bytes_of(4, address + "\npid:[4026531836]\n\xff"
                            "11-"),
      bytes_of(4,
               "failed 0why\xff"
               "1"),
      bytes_of(4,
               "failed 1\xff"
               "11r"),
      bytes_of(2, string(200, '\xfe')),
      bytes_of(2, raw(uint64_t{1}, int64_t{-5}, int32_t{2}, uint8_t{1}, uint8_t{200}, uint8_t{9},
                      uint8_t{255}) +
                      string(64, 'a')),
      bytes_of(5, message(0, 64, 1, 6)),
      bytes_of(5, message(0, -1, 1, 6)),
      bytes_of(5, message(9, int64_t{1} << 62, 1, 6)),
  };
  using trireme::shm::RankBlock;
  for (const uint32_t offset : {uint32_t{0}, uint32_t{256}, uint32_t(sizeof(RankBlock) - 64),
                                uint32_t(sizeof(RankBlock) - 7000)})
    found.push_back(bytes_of(3, raw(offset, uint8_t{32}) + string(32, '\xff') + raw(offset)));
  return found;
}

// The input that is being tried, in a file that outlives a crash.
class LastInput {
 public:
  static constexpr size_t kMost = 4096;
  LastInput() {
    const int fd = ::open("crash-input", O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(kMost)) != 0) std::abort();
    map_ = ::mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map_ == MAP_FAILED) std::abort();
    ::close(fd);
  }
  ~LastInput() {
    ::munmap(map_, kMost);
    ::unlink("crash-input");
  }
  LastInput(const LastInput&) = delete;
  LastInput& operator=(const LastInput&) = delete;
  // Without its length: the zeros behind it are part of the file, and change no reader.
  void try_out(const Bytes& input) {
    std::memset(map_, 0, kMost);
    std::memcpy(map_, input.data(), input.size());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

 private:
  void* map_ = nullptr;
};

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : draw_(seed) {}

  Bytes next(const std::vector<Bytes>& from) {
    Bytes bytes = from[draw_() % from.size()];
    for (uint64_t i = draw_() % 6; i > 0; --i) change(bytes);
    if (bytes.size() > LastInput::kMost) bytes.resize(LastInput::kMost);
    return bytes;
  }

 private:
  void change(Bytes& bytes) {
    constexpr uint8_t kTelling[] = {0x00, 0x01, 0x7f, 0x80, 0xff, ' ', '-', '9', '\n'};
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(draw_() % bytes.size());
    switch (draw_() % 6) {
      case 0:
        *place = static_cast<uint8_t>(draw_());
        return;
      case 1:
        *place = kTelling[draw_() % sizeof(kTelling)];
        return;
      case 2:
        *place = static_cast<uint8_t>(*place ^ (1U << draw_() % 8));
        return;
      case 3:
        bytes.insert(place, kTelling[draw_() % sizeof(kTelling)]);
        return;
      case 4:
        if (bytes.size() > 1) bytes.erase(place);
        return;
      default: {
        Bytes tail(draw_() % 40);
        for (uint8_t& byte : tail) byte = static_cast<uint8_t>(draw_());
        bytes.insert(bytes.end(), tail.begin(), tail.end());
      }
    }
  }

  std::mt19937_64 draw_;
};

Bytes content_of(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) {
  int64_t seconds = 20;
  uint64_t seed = std::random_device{}();
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    if (name == "--seconds" && i + 1 < argc) {
      seconds = std::atoll(argv[++i]);
    } else if (name == "--seed" && i + 1 < argc) {
      seed = std::strtoull(argv[++i], nullptr, 10);
    } else {
      const Bytes input = content_of(argv[i]);
      return LLVMFuzzerTestOneInput(input.data(), input.size());
    }
  }
  std::cout << "[fuzz_shm] seed " << seed << std::endl;
  LastInput last;
  Mutator mutator(seed);
  const std::vector<Bytes> from = seeds();
  int64_t tried = 0;
  for (const Bytes& input : from) last.try_out(input);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 50; ++i) last.try_out(mutator.next(from));
    tried += 50;
  }
  std::cout << "[fuzz_shm] " << tried << " inputs, nothing found" << std::endl;
  return 0;
}

// What libFuzzer does, without its knowledge of what an input reaches: the seeds of a target with
// bytes changed, for a time.
//
//   fuzz_shm --seconds 20 [--seed N]      fuzz_shm FILE   an input that failed once
//
// An input is written to fuzz_shm-crash-input before it is tried, so that whatever happens leaves
// it behind.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <errno.h>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <soak/fuzz_target.h>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

namespace {

using Bytes = std::vector<uint8_t>;

// The input that is being tried, in a file that outlives a crash.
class LastInput {
 public:
  static constexpr size_t kMost = 4096;
  LastInput() {
    fd_ = ::open(path_.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
    if (fd_ < 0) std::abort();
  }
  ~LastInput() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  LastInput(const LastInput&) = delete;
  LastInput& operator=(const LastInput&) = delete;
  void try_out(const Bytes& input) {
    const auto size = static_cast<ssize_t>(input.size());
    if (::pwrite(fd_, input.data(), input.size(), 0) != size || ::ftruncate(fd_, size) != 0)
      std::abort();
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }

 private:
  const std::string path_ = std::string(::program_invocation_short_name) + "-crash-input";
  int fd_ = -1;
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
  const std::string area = std::string("[") + ::program_invocation_short_name + "] ";
  std::cout << area << "seed " << seed << std::endl;
  LastInput last;
  Mutator mutator(seed);
  const std::vector<Bytes> from = trireme::soak::seeds();
  int64_t tried = 0;
  for (const Bytes& input : from) last.try_out(input);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  while (std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 50; ++i) last.try_out(mutator.next(from));
    tried += 50;
  }
  std::cout << area << tried << " inputs, nothing found" << std::endl;
  return 0;
}

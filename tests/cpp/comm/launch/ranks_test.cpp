#include <trireme/comm/launch/ranks.h>

#include <ATen/ATen.h>

#include <cstdio>
#include <cstdlib>
#include <unistd.h>

#include "catch_torch.h"

using namespace trireme;

namespace {

// What `call` writes to stderr, on a process that a launcher made rank 1 of 2.
std::string lines_of(const char* rank, const std::function<void()>& call) {
  std::FILE* file = std::tmpfile();
  const int before = ::dup(2);
  ::dup2(::fileno(file), 2);
  ::setenv("RANK", rank, 1);
  ::setenv("WORLD_SIZE", "2", 1);
  call();
  ::unsetenv("RANK");
  ::unsetenv("WORLD_SIZE");
  ::dup2(before, 2);
  ::close(before);
  std::rewind(file);
  char text[256] = {};
  const size_t size = std::fread(text, 1, sizeof text, file);
  std::fclose(file);
  return {text, size};
}

}  // namespace

TEST_CASE("rank_generator: splitmix64 by rank, a stream of its own for each") {
  CHECK(rank_seed(0, 0) == 0xE220A8397B1DCDAFU);  // its first outputs
  CHECK(rank_seed(0, 1) == 0x6E789E6AA1B965F4U);
  const auto draws = [](uint64_t seed, int64_t rank) {
    return at::rand({4}, rank_generator(seed, rank));
  };
  CHECK(at::equal(draws(7, 1), draws(7, 1)));
  CHECK_FALSE(at::equal(draws(7, 1), draws(7, 0)));
  CHECK_FALSE(at::equal(draws(7, 1), draws(8, 0)));
}

TEST_CASE("news come from rank 0, trouble from all") {
  const auto call = [] {
    log_info("epoch ", 3, " done");
    log_warning("trouble");
  };
  CHECK(lines_of("0", call) == "[0/2] epoch 3 done\n[0/2] trouble\n");
  CHECK(lines_of("1", call) == "[1/2] trouble\n");
  CHECK(lines_of("none", call) == "[0/1] epoch 3 done\n[0/1] trouble\n");
}

#include <trireme/comm/launch/ranks.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/common/env.h>

#include <ATen/Context.h>

#include <cstdio>
#include <stdexcept>

namespace trireme {
namespace {

RankOf own_place() {
  try {
    return current_communicator()->rank_of();
  } catch (const c10::ValueError&) {  // before init(), or after shutdown()
  }
  try {
    return read_launch_environment().rank_of();
  } catch (const std::invalid_argument&) {  // init() will report it; a log line must not
    return {0, 1};
  }
}

}  // namespace

uint64_t rank_seed(uint64_t seed, int64_t rank) {
  uint64_t z = seed + (static_cast<uint64_t>(rank) + 1) * 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

at::Generator rank_generator(uint64_t seed, int64_t rank, c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device).clone();
  generator.set_current_seed(rank_seed(seed, rank));
  return generator;
}

void write_line(const std::string& line, bool on_rank_0_only) {
  const RankOf where = own_place();
  if (on_rank_0_only && where.rank != 0) return;
  const std::string text =
      "[" + std::to_string(where.rank) + "/" + std::to_string(where.world) + "] " + line + "\n";
  std::fputs(text.c_str(), stderr);  // at once, so that lines of several ranks do not mix
}

}  // namespace trireme

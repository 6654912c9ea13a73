// What the collectives of shm/ take without torch, ranks as processes: one line of JSON per size
// with the median time of a call in microseconds, beside what the same processes need to copy as
// many bytes and to read and write them in place.
//
//   shm_collectives RANKS SIZE...     (bytes of the whole tensor)
#include <trireme/shm/collectives.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

using namespace trireme::shm;

namespace {

// Texts in memory that the forked ranks share.
class BoardExchange final : public Exchange {
 public:
  BoardExchange()
      : board_(static_cast<Board*>(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  void put(const std::string& key, const std::string& text) override {
    const int slot = board_->taken.fetch_add(1);
    std::strncpy(board_->keys[slot], key.c_str(), sizeof(board_->keys[slot]) - 1);
    std::strncpy(board_->texts[slot], text.c_str(), sizeof(board_->texts[slot]) - 1);
    board_->ready[slot].store(true);
  }
  std::string get(const std::string& key) override {
    for (;; ::usleep(100))
      for (int slot = 0; slot < 256; ++slot)
        if (board_->ready[slot].load() && key == board_->keys[slot]) return board_->texts[slot];
  }

 private:
  struct Board {
    std::atomic<int> taken;
    std::atomic<bool> ready[256];
    char keys[256][64];
    char texts[256][512];
  };
  Board* board_;
};

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

// The median over rounds of the time per call; every round begins together.
double time_call(Collectives& collectives, int64_t bytes, const std::function<void()>& call) {
  const int calls = static_cast<int>(std::clamp<int64_t>((int64_t{64} << 20) / (bytes + 1), 3, 2000));
  std::vector<double> rounds;
  for (int round = 0; round < 7; ++round) {
    collectives.barrier({});
    const auto begin = Clock::now();
    for (int i = 0; i < calls; ++i) call();
    rounds.push_back(microseconds(Clock::now() - begin) / calls);
  }
  std::nth_element(rounds.begin(), rounds.begin() + 3, rounds.end());
  return rounds[3];
}

void measure(Collectives& collectives, int64_t bytes) {
  const auto world = collectives.group().world();
  const auto rank = collectives.group().rank();
  const auto numel = static_cast<size_t>(bytes) / 4;
  std::vector<float> values(numel, 0), other(numel, 0);
  auto* data = reinterpret_cast<std::byte*>(values.data());
  const Pieces whole(data, bytes);
  std::vector<Pieces> parts;
  for (int64_t r = 0; r < world; ++r)
    parts.emplace_back(data + bytes / world / 4 * 4 * r, bytes / world / 4 * 4);
  const Pieces own(reinterpret_cast<std::byte*>(other.data()), parts[0].bytes());

  const double all_reduce =
      time_call(collectives, bytes, [&] { collectives.all_reduce(whole, {}, {}); });
  const double reduce_scatter =
      time_call(collectives, bytes, [&] { collectives.reduce_scatter(own, parts, {}, {}); });
  const double all_gather =
      time_call(collectives, bytes, [&] { collectives.all_gather(parts, own, Dtype::kF32, {}); });
  const double broadcast =
      time_call(collectives, bytes, [&] { collectives.broadcast(whole, 0, Dtype::kF32, {}); });
  const double copies = time_call(collectives, bytes, [&] {
    std::memcpy(other.data(), values.data(), static_cast<size_t>(bytes));
    asm volatile("" ::"r"(other.data()) : "memory");
  });
  const double in_place = time_call(collectives, bytes, [&] {
    for (float& value : values) value *= 1.0000001F;
    asm volatile("" ::"r"(values.data()) : "memory");
  });
  if (rank == 0) {
    std::printf("{\"ranks\": %d, \"bytes\": %lld, \"all_reduce\": %.3f, \"reduce_scatter\": %.3f, "
                "\"all_gather\": %.3f, \"broadcast\": %.3f, \"memcpy\": %.3f, \"in_place\": %.3f}\n",
                static_cast<int>(world), static_cast<long long>(bytes), all_reduce, reduce_scatter,
                all_gather, broadcast, copies, in_place);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: shm_collectives RANKS SIZE...\n");
    return 2;
  }
  const int64_t world = std::atoll(argv[1]);
  BoardExchange exchange;
  int64_t rank = 0;
  std::vector<pid_t> children;
  for (int64_t r = 1; r < world; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      rank = r;
      children.clear();
      break;
    }
    children.push_back(pid);
  }
  try {
    const auto group = HostGroup::join(exchange, {.where = {rank, world}});
    Collectives collectives(*group);
    for (int i = 2; i < argc; ++i) measure(collectives, std::atoll(argv[i]));
    collectives.barrier({});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  int failed = 0;
  for (const pid_t pid : children) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    failed |= status;
  }
  return failed == 0 ? 0 : 1;
}

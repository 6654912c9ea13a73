#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <list>
#include <numeric>
#include <random>
#include <shm/post.h>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

namespace trireme::shm::test {

// What the ranks of one round do: all of them draw the same operations from the seed.
struct Round {
  int64_t number = 0;
  int64_t world = 2;
  int64_t rank = 0;
  uint64_t seed = 0;
  int64_t operations = 0;  // 0: until something goes wrong
  std::chrono::milliseconds timeout{};
};

// One rank at random operations, each of which it checks.
class RandomRank {
 public:
  RandomRank(ShmRank& self, const Round& round)
      : self_(self), round_(round), draw_(round.seed), post_(self) {}

  // Throws Fault, and std::runtime_error for a wrong result.
  void run() {
    for (int64_t i = 0; round_.operations == 0 || i < round_.operations; ++i) step(i);
  }

 private:
  // Seen by a message that a thread of the courier may still be at when a wait has thrown.
  struct Mail {
    Values out, in;
  };

  void step(int64_t number) {
    const auto kind = draw_() % 7;
    const bool is_large = draw_() % 8 == 0;
    const auto numel = static_cast<size_t>(1 + draw_() % (is_large ? 200'000 : 3000));
    const auto root = static_cast<int64_t>(draw_() % static_cast<uint64_t>(round_.world));
    const std::string label = "step " + std::to_string(number);
    const CallOptions call{.label = label};
    switch (kind) {
      case 0:
        return all_reduce(numel, call);
      case 1:
        return reduce_scatter(numel, call);
      case 2:
        return all_gather(numel, call);
      case 3:
        return broadcast(numel, root, call);
      case 4:
        return all_to_all(numel, call);
      case 5:
        return self_.collectives.barrier(call);
      default:
        return pass_on(numel, number);
    }
  }

  static void expect(bool true_, std::string_view what) {
    if (!true_) throw std::runtime_error("wrong result of " + std::string(what));
  }

  void all_reduce(size_t numel, const CallOptions& call) {
    Values values = values_of(self_.rank, numel);
    self_.collectives.all_reduce(pieces_of(values), {Dtype::kI32, ReduceOp::kSum}, call);
    expect(values == sums(numel), "all_reduce");
  }

  void reduce_scatter(size_t numel, const CallOptions& call) {
    Values values = values_of(self_.rank, numel);
    Values own(numel);
    const std::vector<Pieces> inputs(static_cast<size_t>(round_.world), pieces_of(values));
    self_.collectives.reduce_scatter(pieces_of(own), inputs, {Dtype::kI32, ReduceOp::kSum}, call);
    expect(own == sums(numel), "reduce_scatter");
  }

  void all_gather(size_t numel, const CallOptions& call) {
    Values own = values_of(self_.rank, numel);
    std::vector<Values> all(static_cast<size_t>(round_.world), Values(numel));
    self_.collectives.all_gather(pieces_of_each(all), pieces_of(own), Dtype::kI32, call);
    expect_from_each(all, "all_gather");
  }

  void broadcast(size_t numel, int64_t root, const CallOptions& call) {
    Values values = values_of(self_.rank, numel);
    self_.collectives.broadcast(pieces_of(values), root, Dtype::kI32, call);
    expect(values == values_of(root, numel), "broadcast");
  }

  void all_to_all(size_t numel, const CallOptions& call) {
    std::vector<Values> out(static_cast<size_t>(round_.world), values_of(self_.rank, numel));
    std::vector<Values> in(out.size(), Values(numel));
    self_.collectives.all_to_all(pieces_of_each(in), pieces_of_each(out), Dtype::kI32, call);
    expect_from_each(in, "all_to_all");
  }

  // To the next rank, from the one before.
  void pass_on(size_t numel, int64_t tag) {
    const int64_t before = (self_.rank + round_.world - 1) % round_.world;
    mails_.push_back({values_of(self_.rank, numel), Values(numel)});
    Mail& mail = mails_.back();
    const TransferPtr recv = post_.start_recv(mail.in, before, tag);
    const TransferPtr send = post_.start_send(mail.out, (self_.rank + 1) % round_.world, tag);
    post_.wait(recv);
    post_.wait(send);
    expect(mail.in == values_of(before, numel), "recv");
    mails_.clear();
  }

  Values sums(size_t numel) const {
    Values total(numel);
    for (int64_t rank = 0; rank < round_.world; ++rank) {
      const Values values = values_of(rank, numel);
      std::transform(total.begin(), total.end(), values.begin(), total.begin(), std::plus<>());
    }
    return total;
  }

  static std::vector<Pieces> pieces_of_each(std::vector<Values>& all) {
    std::vector<Pieces> pieces;
    for (Values& values : all) pieces.push_back(pieces_of(values));
    return pieces;
  }

  static void expect_from_each(const std::vector<Values>& all, std::string_view what) {
    for (size_t rank = 0; rank < all.size(); ++rank)
      expect(all[rank] == values_of(static_cast<int64_t>(rank), all[rank].size()), what);
  }

  ShmRank& self_;
  Round round_;
  std::mt19937_64 draw_;
  std::list<Mail> mails_;  // outlives the courier
  Post post_;
};

// What a process holds; a group that is gone must leave nothing of it behind.
struct Holdings {
  int64_t descriptors = 0;
  int64_t segments = 0;
  int64_t resident_kib = 0;

  static Holdings of_this_process() {
    Holdings found;
    for (int fd = 0; fd < 1024; ++fd) found.descriptors += ::fcntl(fd, F_GETFD) >= 0;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      found.segments += line.find("trireme (deleted)") != std::string::npos ||
                        line.find("/dev/shm/trireme") != std::string::npos;
    std::ifstream statm("/proc/self/statm");
    int64_t pages = 0;
    statm >> pages >> pages;
    found.resident_kib = pages * (::sysconf(_SC_PAGESIZE) / 1024);
    return found;
  }
};

}  // namespace trireme::shm::test

#pragma once

#include <trireme/shm/courier.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <shm/two_processes.h>
#include <vector>

namespace trireme::shm::test {

using Values = std::vector<int32_t>;
constexpr size_t kMoreThanARing = 300'000;  // elements

inline Values values_of(int64_t seed, size_t numel) {
  Values values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<int32_t>(seed * 7919 + int64_t(i) * 3);
  return values;
}

// A rank's messages, in words that a test can be read in.
class Post {
 public:
  explicit Post(ShmRank& self) : courier_(self.group) {}

  TransferPtr start_send(Values& values, int64_t to, int64_t tag = 0,
                         std::chrono::milliseconds timeout = {}) {
    return start(Transfer::Kind::kSend, values, to, tag, timeout);
  }
  TransferPtr start_recv(Values& values, int64_t from, int64_t tag = 0,
                         std::chrono::milliseconds timeout = {}) {
    return start(Transfer::Kind::kRecv, values, from, tag, timeout);
  }
  void wait(const TransferPtr& transfer) {
    courier_.wait(*transfer);
    if (transfer->fault) throw *transfer->fault;
  }
  void send(Values values, int64_t to, int64_t tag = 0, std::chrono::milliseconds timeout = {}) {
    wait(start_send(values, to, tag, timeout));
  }
  Values recv(size_t numel, int64_t from, int64_t tag = 0, std::chrono::milliseconds timeout = {}) {
    Values values(numel, -1);
    wait(start_recv(values, from, tag, timeout));
    return values;
  }
  Courier& courier() { return courier_; }

 private:
  TransferPtr start(Transfer::Kind kind, Values& values, int64_t peer, int64_t tag,
                    std::chrono::milliseconds timeout) {
    auto transfer = std::make_shared<Transfer>();
    transfer->kind = kind;
    transfer->peer = peer;
    transfer->tag = tag;
    transfer->memory = pieces_of(values);
    transfer->dtype = Dtype::kI32;
    transfer->timeout = timeout;
    courier_.post(transfer);
    return transfer;
  }

  Courier courier_;
};

// Runs the ranks and counts what they found wrong.
inline int count_wrong(const ShmRun& run, const std::function<int(ShmRank&, Post&)>& rank_main) {
  std::atomic<int> wrong{0};
  run_shm_ranks(run, [&](ShmRank& self) {
    Post post(self);
    wrong += rank_main(self, post);
  });
  return wrong;
}

}  // namespace trireme::shm::test

#pragma once

#include <trireme/common/export.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace trireme {

// The times of one synchronized step, on this rank's host clock (milliseconds, without work that a
// CUDA device still has to do). communication = hidden + exposed.
struct StepReport {
  int64_t step = 0;
  double forward_ms = 0;  // all forwards since the last synchronized backward
  double backward_ms =
      0;  // from the first gradient at an output to the end of backward, waiting included
  double waiting_ms = 0;       // waiting for collectives, backward having nothing else to do
  double exposed_comm_ms = 0;  // = waiting_ms
  double hidden_comm_ms = 0;   // some collective was in flight while backward computed
  int64_t reduced_bytes = 0;   // payload of this rank, once
  int64_t buckets = 0;
  // Under compression: what this rank sent to other senders, beside the used-map (an all-reduce
  // counts once), and how long it took to code it. Else 0.
  int64_t sent_bytes = 0;
  double encode_ms = 0;
  bool streamed = false;  // gradients went as one stream of deposits, see stream_transport.h
};

// Measures the times of one step.
class StepClock {
 public:
  using Clock = std::chrono::steady_clock;

  void forward_begins() { forward_begin_ = Clock::now(); }
  void forward_ends() { open_.forward_ms += ms(Clock::now() - forward_begin_); }
  void backward_begins(int64_t step, bool streamed) {
    open_.step = step;
    open_.streamed = streamed;
    open_.reduced_bytes = open_.buckets = 0;
    backward_begin_ = Clock::now();
    waited_ = {};
    busy_ = {};
    busy_until_ = backward_begin_;
    launched_.clear();
  }
  void bucket_launched(int64_t bytes) {
    launched_.push_back(Clock::now());
    open_.reduced_bytes += bytes;
    ++open_.buckets;
  }
  void codes_sent(int64_t bytes, double encode_ms) {
    open_.sent_bytes = bytes;
    open_.encode_ms = encode_ms;
  }
  // Counts buckets in launch order. Without a time from the engine the bucket ended now.
  void bucket_done(size_t bucket, std::optional<Clock::time_point> finished) {
    const Clock::time_point end = finished.value_or(Clock::now());
    const Clock::time_point begin = std::max(launched_[bucket], busy_until_);
    if (end > begin) busy_ += end - begin;
    busy_until_ = std::max(busy_until_, end);
  }
  void waited(Clock::duration duration) { waited_ += duration; }
  void backward_ends() {
    open_.backward_ms = ms(Clock::now() - backward_begin_);
    open_.waiting_ms = open_.exposed_comm_ms = ms(waited_);
    open_.hidden_comm_ms = std::max(0.0, ms(busy_) - ms(waited_));
    last_ = open_;
    open_ = {};
  }

  const StepReport& last() const { return last_; }

 private:
  static double ms(Clock::duration duration) {
    return std::chrono::duration<double, std::milli>(duration).count();
  }

  StepReport open_;
  StepReport last_;
  Clock::time_point forward_begin_;
  Clock::time_point backward_begin_;
  Clock::time_point busy_until_;
  Clock::duration waited_{};
  Clock::duration busy_{};
  std::vector<Clock::time_point> launched_;
};

}  // namespace trireme

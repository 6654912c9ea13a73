#include <trireme/strategies/pipeline/pipeline.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_recomputation.h>

#include <torch/nn.h>

#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::peak_bytes_test {

using test::Engine;
using test::run_thread_ranks;
using test::ThreadRank;

constexpr int64_t kWidth = 16;
constexpr int64_t kRows = 4;  // a micro-batch has so many
constexpr int64_t kChunks = 8;
constexpr int64_t kBytes = kRows * kWidth * int64_t{sizeof(float)};

// Counts the bytes of tensors that are alive.
struct Counter {
  void add(int64_t bytes) {
    const int64_t now = bytes_ += bytes;
    int64_t most = peak;
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
  }
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> peak{0};
};

// Returns a copy of `values` that is counted until nobody holds it.
at::Tensor counted(const at::Tensor& values, const std::shared_ptr<Counter>& counter) {
  const auto bytes = static_cast<int64_t>(values.nbytes());
  auto* memory = new float[static_cast<size_t>(values.numel())];
  std::memcpy(memory, values.contiguous().data_ptr(), static_cast<size_t>(bytes));
  counter->add(bytes);
  const auto drop = [memory, bytes, counter](void*) {
    counter->add(-bytes);
    delete[] memory;
  };
  return at::from_blob(memory, values.sizes(), drop, at::kFloat);
}

struct Identity : torch::autograd::Function<Identity> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& values,
                            const std::shared_ptr<Counter>& counter) {
    return counted(values, counter);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

// Hands on what it gets in memory that is counted: the linear layer behind it keeps that for the
// gradient of its weight.
struct CountedImpl : torch::nn::Module {
  explicit CountedImpl(std::shared_ptr<Counter> counted) : counter(std::move(counted)) {}
  at::Tensor forward(const at::Tensor& values) { return Identity::apply(values, counter); }
  std::shared_ptr<Counter> counter;
};
TORCH_MODULE(Counted);

bool is_within_a_tenth(int64_t got, int64_t expected) {
  return std::abs(static_cast<double>(got - expected)) <= 0.1 * static_cast<double>(expected);
}

// Returns what one stage does.
RankActions row_of(const PipelineSchedule& schedule, int64_t stage) {
  RankActions row;
  const auto rank = static_cast<size_t>(schedule.stage_rank[static_cast<size_t>(stage)]);
  for (const PipelineAction& action : schedule.rows[rank])
    for_each_part(action, [&](const PipelineAction& part) {
      if (part.stage == stage) row.push_back(part);
    });
  return row;
}

// Returns the bytes that a stage says it kept at its peak: what it received from F on, and what it
// returned from F on, or from R.
int64_t most_bytes_in(const RankActions& row) {
  const auto recomputed = recomputed_in(row);
  int64_t blocks = 0;
  int64_t most = 0;
  for (const PipelineAction& action : row) {
    const bool is_recomputed = recomputed.count({action.stage, action.micro_batch}) > 0;
    if (action.kind == ActionKind::kForward) blocks += is_recomputed ? 1 : 2;
    if (action.kind == ActionKind::kRecompute) ++blocks;
    most = std::max(most, blocks);
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kBackwardWeight)
      blocks -= 2;
  }
  return most * kBytes;
}

// Trains on one rank; returns what differs from the schedule.
std::vector<std::string> train(ThreadRank& rank, const PipelineOptions& options) {
  const int64_t stages = schedule_of(options, rank.where.world).stages;
  const auto counter = std::make_shared<Counter>();
  torch::nn::Sequential net;
  for (int64_t stage = 0; stage < stages; ++stage) {
    net->push_back(Counted(counter));
    net->push_back(torch::nn::Linear(kWidth, kWidth));
  }
  Pipeline<> pipe(net, rank.communicator, options);
  const at::Tensor x = at::ones({kChunks * kRows, kWidth});
  const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
    return (output - target).square().mean();
  };
  std::vector<std::string> wrong;
  for (int64_t step = 0; step < 2; ++step) {
    counter->peak = 0;
    pipe->step(x, x, loss);
    const int64_t expected = peak_activations(pipe->schedule(), rank.where.rank) * kBytes;
    // A forward that is to be recomputed holds what it computes with, while it runs.
    const int64_t running = options.checkpoint == "never" ? 0 : kBytes;
    if (!is_within_a_tenth(counter->peak, expected) &&
        !is_within_a_tenth(counter->peak, expected + running)) {
      wrong.push_back(c10::str("rank ", rank.where.rank, " held ", counter->peak.load(),
                               " bytes, expected ", expected));
    }
    if (counter->bytes_ != 0) wrong.push_back("bytes after the step");
    for (const StageReport& report : pipe->last_step().stages) {
      const RankActions row = row_of(pipe->schedule(), report.stage);
      const int64_t live = most_live(row);
      if (report.peak_live == live && report.peak_live_bytes == most_bytes_in(row)) continue;
      wrong.push_back(c10::str("stage ", report.stage, " said ", report.peak_live, " and ",
                               report.peak_live_bytes, " bytes, expected ", live));
    }
  }
  return wrong;
}

// Returns all pairs of a form and a mode.
std::vector<std::pair<std::string, std::string>> forms_and_modes() {
  std::vector<std::pair<std::string, std::string>> all;
  for (const char* form : {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-v",
                           "dualpipe-v", "zb-auto"})
    for (const char* mode : {"never", "except_last", "always", "auto"})
      all.emplace_back(form, mode);
  return all;
}

TEST_CASE("activations at their peak are as many as the schedule says, in bytes") {
  for (const int64_t world : {2, 4}) {
    for (const auto& [schedule, checkpoint] : forms_and_modes()) {
      PipelineOptions options;
      options.chunks = kChunks;
      options.schedule = schedule;
      options.checkpoint = checkpoint;
      std::mutex mutex;
      std::vector<std::string> wrong;
      run_thread_ranks(
          world,
          [&](ThreadRank& rank) {
            const std::vector<std::string> here = train(rank, options);
            const std::lock_guard<std::mutex> lock(mutex);
            wrong.insert(wrong.end(), here.begin(), here.end());
          },
          std::chrono::seconds(30), Engine::kShm);
      CAPTURE(schedule, checkpoint, world, wrong);
      CHECK(wrong.empty());
    }
  }
}

}  // namespace trireme::peak_bytes_test

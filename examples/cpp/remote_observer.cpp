// Plays CartPole for the agent of examples/python/remote_rl.py, which is a Python program.
//
// It joins the agent's group as any rank does. Rank 0 is the agent, here rank 1 is this program:
//
//   export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2
//   RANK=0 python examples/python/remote_rl.py &
//   RANK=1 build/current/examples/cpp/remote_observer
//
// The agent calls the class "Observer" of whoever is there. Equations and random numbers are those
// of the Python program, and so are the rewards.

#include <trireme/strategies/remote/endpoint.h>
#include <trireme/trireme.h>

#include <torch/torch.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <future>
#include <string>
#include <vector>

namespace remote = trireme::remote;

constexpr int64_t kMostSteps = 200;  // end an episode

// Draws numbers in [0, 1): SplitMix64.
class UniformNumbers {
 public:
  explicit UniformNumbers(int64_t seed) : state_(static_cast<uint64_t>(seed)) {}

  double next() {
    state_ += 0x9E3779B97F4A7C15;
    uint64_t mixed = state_;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return static_cast<double>((mixed ^ mixed >> 31) >> 11) / static_cast<double>(1ULL << 53);
  }

 private:
  uint64_t state_;
};

// Is a pole on a cart, after Barto, Sutton and Anderson (1983): SI units, Euler's steps.
class CartPole {
 public:
  explicit CartPole(UniformNumbers& drawn) {
    for (double& number : state_) number = 0.1 * drawn.next() - 0.05;
  }

  const std::array<double, 4>& state() const { return state_; }

  // Goes on by one step; returns whether the pole still stands.
  bool push(bool to_the_right) {
    auto& [x, speed, angle, turning] = state_;
    const double force = to_the_right ? kForce : -kForce;
    const double sine = std::sin(angle);
    const double cosine = std::cos(angle);
    const double total = kCart + kPole;
    const double moment = kPole * kHalfLength;
    const double common = (force + moment * turning * turning * sine) / total;
    const double turning_more = (kGravity * sine - cosine * common) /
                                (kHalfLength * (4.0 / 3.0 - kPole * cosine * cosine / total));
    const double faster = common - moment * turning_more * cosine / total;
    x += kSeconds * speed;
    speed += kSeconds * faster;
    angle += kSeconds * turning;
    turning += kSeconds * turning_more;
    return std::abs(x) <= kFarthest && std::abs(angle) <= kSteepest;
  }

 private:
  static constexpr double kGravity = 9.8;
  static constexpr double kCart = 1.0;
  static constexpr double kPole = 0.1;
  static constexpr double kHalfLength = 0.5;
  static constexpr double kForce = 10.0;
  static constexpr double kSeconds = 0.02;
  static constexpr double kFarthest = 2.4;
  static constexpr double kSteepest = 12 * 2 * M_PI / 360;

  std::array<double, 4> state_ = {};  // place and speed of the cart, angle and turning of the pole
};

// Plays until the pole falls. Has a row for each step: the state, and 1 for a push to the right.
// `likely` says how likely such a push should be.
template <typename Likely>
torch::Tensor play_episode(const Likely& likely, int64_t seed) {
  UniformNumbers drawn(seed);
  CartPole pole(drawn);
  std::vector<float> rows;
  int64_t steps = 0;
  for (bool stands = true; stands && steps < kMostSteps; ++steps) {
    std::vector<float> state;
    for (const double number : pole.state()) state.push_back(static_cast<float>(number));
    const bool to_the_right = drawn.next() < likely(torch::tensor(state));
    rows.insert(rows.end(), state.begin(), state.end());
    rows.push_back(to_the_right ? 1.0F : 0.0F);
    stands = pole.push(to_the_right);
  }
  return torch::tensor(rows).view({steps, 5});
}

// Is set once this rank has joined. The agent may be faster, and calls before.
std::promise<remote::Endpoint*> joined;
const std::shared_future<remote::Endpoint*> endpoint_when_joined = joined.get_future();

class Observer {
 public:
  torch::Tensor play(const remote::RefPtr& agent, int64_t seed) {
    remote::Endpoint& endpoint = *endpoint_when_joined.get();
    return play_episode(
        [&](const torch::Tensor& state) {
          return endpoint.call_method<double>(agent, "act", state);
        },
        seed);
  }
};

int main() {
  remote::define_class<Observer>("Observer", remote::init<>(),
                                 remote::method("play", &Observer::play));
  trireme::InitOptions on_cpu;
  on_cpu.device = torch::kCPU;
  trireme::Context ctx = trireme::init(on_cpu);
  if (ctx.rank() == 0) {
    std::fprintf(stderr, "got rank 0, which is the agent's. Start remote_rl.py as rank 0.\n");
    return 2;
  }
  remote::Endpoint endpoint(ctx, "observer" + std::to_string(ctx.rank()));
  joined.set_value(&endpoint);
  endpoint.stop();  // serves until the agent is here
  return 0;
}

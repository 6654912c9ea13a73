// The order in which gradients arrive, as one rank learns and sends it. A recorded group plays the
// peers: what rank 0 sends is what everybody gets.

#include <trireme/grad/arrival_order.h>

#include <catch_torch.h>
#include <recording_communicator.h>

namespace trireme::arrival_order_test {

using trireme::test::RecordingCommunicator;

namespace {

using Order = std::vector<int64_t>;

struct Learner {
  explicit Learner(size_t parameters) { order.begin(parameters); }

  // Returns which of these arrivals were the last ones of their parameters.
  std::vector<bool> step(const Order& arrivals) {
    order.begin_step();
    std::vector<bool> last;
    for (const int64_t parameter : arrivals) last.push_back(order.arrived(parameter));
    return last;
  }
  std::optional<Order> learned(const Order& planned) {
    order.end_step();
    order.send(ranks, planned, c10::kCPU);
    return order.receive(ranks);
  }

  RecordingCommunicator ranks{RankOf{0, 2}};
  ArrivalOrder order;
};

}  // namespace

TEST_CASE("gradients are expected in the order of their last arrivals, others behind them") {
  Learner learner(5);
  learner.step({3, 1, 3, 0});
  CHECK(learner.order.is_observing());
  CHECK(learner.learned({4, 3, 2, 1, 0}) == Order{1, 3, 0, 4, 2});
  CHECK_FALSE(learner.order.is_observing());
  CHECK(learner.order.receive(learner.ranks) == std::nullopt);  // it is told once
}

TEST_CASE("a parameter that is not planned has no place in the order") {
  Learner learner(3);
  learner.step({2, 0, 1});
  CHECK(learner.learned({1, 2}) == Order{2, 1});
}

TEST_CASE("a gradient is complete when it came as often as in the step before") {
  Learner learner(2);
  CHECK(learner.step({0, 1, 0}) == std::vector<bool>{true, true, false});
  learner.order.end_step();
  CHECK(learner.step({0, 1, 0}) == std::vector<bool>{false, true, true});
  SECTION("a step that is lost may ask for more, never for less") {
    learner.order.abandon_step();
    learner.step({1});
    learner.order.abandon_step();
    CHECK(learner.step({0, 0}) == std::vector<bool>{false, true});
  }
  SECTION("what did not come is expected once") {
    learner.order.end_step();
    learner.step({1});
    learner.order.end_step();
    CHECK(learner.step({0}) == std::vector<bool>{true});
  }
}

TEST_CASE("an order that begins in the middle of a step has not observed it") {
  Learner learner(2);
  learner.step({0, 1});
  CHECK(learner.order.has_observed());
  CHECK(learner.order.last_arrived() == 1);
  learner.order.begin(3);
  CHECK_FALSE(learner.order.has_observed());
  CHECK(learner.order.is_observing());
  CHECK(learner.order.last_arrived() == -1);
}

}  // namespace trireme::arrival_order_test

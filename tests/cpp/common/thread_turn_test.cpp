#include <trireme/common/thread_turn.h>

#include <catch_torch.h>
#include <future>

namespace trireme {

TEST_CASE("a turn waits for its thread, until the thread or the time has ended") {
  ThreadTurn turn("area", std::chrono::milliseconds(100));
  const auto elsewhere = [](const auto& call) {
    return std::async(std::launch::async, call).get();
  };
  CHECK(turn.take());
  CHECK_FALSE(turn.take());
  CHECK_THROWS_WITH(elsewhere([&] { return turn.take(); }),
                    Catch::Contains("[area] got a pass that has waited 0.1 s for one of another"));
  CHECK_FALSE(elsewhere([&] { return turn.try_take(); }));
  turn.give_back();
  CHECK(elsewhere([&] { return turn.take(); }));
  CHECK(turn.take());
}

}  // namespace trireme

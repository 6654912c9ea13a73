// What runs beside a stream, and who waits for whom.

#include <trireme/memory/stream_handoff.h>

#include <catch_torch.h>
#include <device/sim_rows.h>

namespace trireme::stream_handoff_test {

using namespace trireme::test;

TEST_CASE("beside() comes after what the caller's stream was given, and waits for no more") {
  use_sim_device(sim_device(0));
  StreamHandoff handoff(sim_device(0));
  const at::Tensor came = pinned(0);
  at::Tensor sent;
  {
    HeldStream before(current_stream());
    sent = to_sim(pinned(1));
    handoff.beside([&] { came.copy_(sent, /*non_blocking=*/true); });
    CHECK(are(came, 0));
    before.release();
  }
  HeldStream after(current_stream());
  handoff.wait();
  CHECK(are(came, 1));
  after.release();
}

TEST_CASE("the caller's stream waits for beside() from join() on") {
  use_sim_device(sim_device(0));
  StreamHandoff handoff(sim_device(0));
  const at::Tensor place = to_sim(pinned(0));
  SimStream* side = nullptr;
  handoff.beside([&] { side = &current_stream(); });
  REQUIRE(side != &current_stream());
  HeldStream held(*side);
  handoff.beside([&] { place.copy_(pinned(1), /*non_blocking=*/true); });
  CHECK(are(place, 0));
  handoff.join();
  held.release();
  CHECK(are(place, 1));
}

TEST_CASE("memory that beside() reads stays, whoever frees it") {
  use_sim_device(sim_device(0));
  for (const bool is_kept : {false, true}) {
    CAPTURE(is_kept);
    StreamHandoff handoff(sim_device(0));
    const at::Tensor came = pinned(0);
    at::Tensor sent = to_sim(pinned(1));
    SimStream* side = nullptr;
    handoff.beside([&] { side = &current_stream(); });
    HeldStream held(*side);
    handoff.beside([&] {
      if (is_kept) StreamHandoff::keep(sent);
      came.copy_(sent, /*non_blocking=*/true);
    });
    sent.reset();
    if (!is_kept) current_stream().wait(current_stream().last());
    held.release();
    handoff.wait();
    CHECK(are(came, 1) == is_kept);
  }
}

TEST_CASE("on CPU it is done at once") {
  StreamHandoff handoff(c10::kCPU);
  bool was_called = false;
  handoff.beside([&] { was_called = true; });
  CHECK(was_called);
  handoff.join();
  handoff.note();
  handoff.wait();
}

}  // namespace trireme::stream_handoff_test

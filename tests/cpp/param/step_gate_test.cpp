// Who reads and who writes what a host has once: ranks as threads.

#include <trireme/param/step_gate.h>

#include <trireme/memory/host_store.h>
#include <trireme/shm/segment.h>

#include <ATen/ATen.h>

#include <atomic>
#include <catch_torch.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::step_gate_test {

using trireme::test::Engine;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

std::shared_ptr<HostStore> store_of(ThreadRank& rank) {
  ParameterInfo info;
  info.name = "p";
  info.sizes = {rank.where.world};
  info.numel = rank.where.world;
  const int64_t bytes = HostStore::bytes_for({info}, rank.where.world);
  return HostStore::make(rank.communicator->host()->share_memory(bytes, "test").segment, {info},
                         rank.where);
}

void on_shm(int64_t world, const std::function<void(ThreadRank&)>& main,
            std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  run_thread_ranks(world, main, timeout, Engine::kShm);
}

}  // namespace

TEST_CASE("versions: writing and reading take turns, and either may be said twice") {
  std::vector<std::string> steps(2);
  on_shm(2, [&](ThreadRank& rank) {
    StepGate gate(store_of(rank), rank.communicator);
    std::string& seen = steps[static_cast<size_t>(rank.where.rank)];
    const auto note = [&] {
      seen += (gate.is_writing() ? "w" : "r") + std::to_string(gate.version());
    };
    note();
    gate.begin_writing();  // it is
    note();
    for (int pass = 0; pass < 2; ++pass) {
      gate.begin_reading();
      note();
      gate.begin_reading();
      note();
      gate.begin_writing();
      note();
    }
  });
  for (const std::string& seen : steps) CHECK(seen == "w1w1r1r1w2r2r2w3");
}

TEST_CASE("ranks hear at the gate whether they multiplied their gradients alike") {
  std::vector<std::vector<FactorRange>> heard(3);
  on_shm(3, [&](ThreadRank& rank) {
    StepGate gate(store_of(rank), rank.communicator);
    std::vector<FactorRange>& own = heard[static_cast<size_t>(rank.where.rank)];
    const auto pass = [&](const FactorRange& factor) {
      gate.begin_reading();
      own.push_back(gate.begin_writing(factor));
    };
    const double number = static_cast<double>(rank.where.rank);
    pass({});
    pass({number, number + 2.5});
    if (rank.where.rank == 1) {
      pass({});  // it has nothing to say
    } else {
      pass({0.5 + number, 1 + number});
    }
    own.push_back(gate.begin_writing({7, 8}));  // it is
  });
  for (const auto& own : heard) {
    REQUIRE(own.size() == 4);
    CHECK(own[0] == FactorRange{});
    CHECK(own[1] == FactorRange{2, 2.5});
    CHECK(own[2].is_empty());
    CHECK(own[3] == FactorRange{});
  }
}

TEST_CASE("a reader sees the writes of all ranks, a writer disturbs no reader") {
  constexpr int64_t kVersions = 200;
  std::atomic<int64_t> wrong{0};
  on_shm(3, [&](ThreadRank& rank) {
    const auto store = store_of(rank);
    StepGate gate(store, rank.communicator);
    const at::Tensor whole = store->whole(0);
    for (int64_t version = 1; version <= kVersions; ++version) {
      whole[rank.where.rank] = static_cast<double>(version);
      // One rank reads more often than the others, and one not at all.
      for (int64_t forward = 0; forward < rank.where.rank; ++forward) {
        gate.begin_reading();
        wrong += (whole != static_cast<double>(version)).sum().item<int64_t>();
      }
      gate.begin_reading();
      gate.begin_writing();
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("a rank that does not come is waited for until the timeout, and named") {
  std::string said;
  bool may_try_again = false;
  std::atomic<bool> is_over{false};
  on_shm(2, [&](ThreadRank& rank) {
    StepGate gate(store_of(rank), rank.communicator);
    rank.communicator->barrier("made").wait();
    if (rank.where.rank == 0) {
      rank.group->getBackend(c10::DeviceType::CPU)->setTimeout(std::chrono::seconds(1));
      try {
        gate.begin_reading();
      } catch (const c10::DistBackendError& error) {
        said = error.what_without_backtrace();
      }
      may_try_again = gate.is_writing();
      is_over = true;
      is_over.notify_all();
    } else {
      is_over.wait(false);
    }
  });
  CHECK(may_try_again);
  CHECK_THAT(said, Catch::Contains("step gate: written, parameters of version 1"));
  CHECK_THAT(said, Catch::Contains("rank 1"));
}

TEST_CASE("a rank that left word ends the wait") {
  std::string said;
  on_shm(2, [&](ThreadRank& rank) {
    StepGate gate(store_of(rank), rank.communicator);
    gate.begin_reading();
    if (rank.where.rank == 1) {
      rank.communicator->announce_failure("[test] stumbled");
      return;
    }
    try {
      gate.begin_writing();
    } catch (const c10::DistBackendError& error) {
      said = error.what_without_backtrace();
    }
  });
  CHECK_THAT(said, Catch::Contains("stumbled"));
}

TEST_CASE("a rank alone waits for nobody") {
  ParameterInfo info;
  info.name = "p";
  info.sizes = {2};
  info.numel = 2;
  auto segment = std::make_shared<const shm::Segment>(
      shm::Segment::create(shm::SegmentKind::kAnonymous, HostStore::bytes_for({info}, 1)));
  const auto store = HostStore::make(std::move(segment), {info}, {0, 1});
  run_thread_ranks(1, [&](ThreadRank& rank) {
    StepGate gate(store, rank.communicator);
    for (int64_t version = 1; version < 4; ++version) {
      gate.begin_reading();
      gate.begin_writing();
    }
  });
  CHECK(store->version() == 3);
  CHECK(store->release_of(0) == 3);
}

}  // namespace trireme::step_gate_test

// Messages of a leg between two hosts.

#include <trireme/comm/hosts/host_leg.h>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <catch_torch.h>
#include <cstddef>
#include <half_writable.h>
#include <string>
#include <thread>
#include <vector>

namespace trireme::host_leg_test {

using trireme::test::HalfWritable;

namespace {

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

}  // namespace

TEST_CASE("a leg whose connection breaks in the middle of a message says so at once") {
  using std::chrono::seconds;
  const HalfWritable half;
  const at::Tensor sent = at::ones_like(half.tensor());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> said(2);
  const auto main_of = [&](int64_t rank) {
    const HostLayout layout({{0}, {1}}, rank);
    const GlooOptions options{
        .timeout = seconds(30), .connect_timeout = seconds(30), .hostname = "127.0.0.1"};
    HostLeg leg(store, layout, options, [] { return false; });
    HostLeg::Flight flight(&leg);
    try {
      if (rank == 0) {
        leg.send(flight, 1, bytes_of(sent), HalfWritable::kBytes);
      } else {
        leg.recv(flight, 0, bytes_of(half.tensor()), HalfWritable::kBytes);
      }
      leg.land(flight, shm::Clock::now() + seconds(30));
    } catch (const LegBroken& error) {
      said[static_cast<size_t>(rank)] = error.what();
    }
  };
  std::thread first([&] { main_of(0); });
  std::thread second([&] { main_of(1); });
  first.join();
  second.join();
  CHECK_THAT(said[0], Catch::StartsWith("rank 1 on another host no longer answers"));
  CHECK_THAT(said[1], Catch::StartsWith("rank 0 on another host no longer answers") &&
                          Catch::Contains("Bad address"));
}

}  // namespace trireme::host_leg_test

// The values of one moment, read while others write the tensors.

#include <trireme/memory/snapshot.h>

#include <ATen/ATen.h>

#include <atomic>
#include <catch_torch.h>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace trireme::snapshot_test {
namespace {

constexpr int64_t kBlock = int64_t{1} << 20;

// Reads all of a snapshot's tensors; `before` is called with each block. Returns whether all are
// whole.
bool read_all(Snapshot& snapshot, std::vector<std::string>& read,
              const std::function<void()>& before) {
  bool is_whole = true;
  for (size_t i = 0; i < read.size(); ++i)
    is_whole = snapshot.read(i, [&](int64_t begin, std::string_view bytes) {
      before();
      CHECK(begin == static_cast<int64_t>(read[i].size()));
      read[i].append(bytes);
    }) && is_whole;
  snapshot.close();
  return is_whole;
}

std::string bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::vector<at::Tensor> some_tensors() {
  return {at::arange(3 * kBlock / 4 + 5, at::kFloat), at::empty({0}), at::ones({7}, at::kByte),
          at::arange(kBlock / 8, at::kLong)};
}

}  // namespace

TEST_CASE("a snapshot has the values of its moment, whenever they are written") {
  // A writer comes before the reading, at one of its blocks, or never.
  for (int comes_at = -1; comes_at < 7; ++comes_at) {
    const std::vector<at::Tensor> tensors = some_tensors();
    std::vector<std::string> expected, read(tensors.size());
    for (const at::Tensor& tensor : tensors) expected.push_back(bytes_of(tensor));
    const auto snapshot = Snapshot::make(tensors, {tensors[0]});
    std::thread writer;
    const auto write = [&] {
      keep_snapshots_of({tensors[0]});
      for (const at::Tensor& tensor : tensors) at::Tensor(tensor).add_(1);
    };
    int block = 0;
    if (comes_at == 0) write();
    CHECK(read_all(*snapshot, read, [&] {
      if (++block == comes_at) writer = std::thread(write);
    }));
    if (writer.joinable()) writer.join();
    CHECK(read == expected);
  }
  CHECK_FALSE(has_snapshots());
}

TEST_CASE("an unannounced write is found, before and after others are kept") {
  for (const bool is_kept : {false, true}) {
    const std::vector<at::Tensor> tensors = some_tensors();
    std::vector<std::string> read(tensors.size());
    const auto snapshot = Snapshot::make(tensors, {});
    at::Tensor(tensors[3]).add_(1);
    if (is_kept) keep_all_snapshots();
    CHECK_FALSE(read_all(*snapshot, read, [] {}));
    CHECK(read[0] == bytes_of(tensors[0]));
  }
}

TEST_CASE("writes of other tensors, and of what was read, hold nobody up") {
  const at::Tensor tensor = at::ones({10}), other = at::ones({10});
  const auto snapshot = Snapshot::make({tensor}, {tensor});
  keep_snapshots_of({other});
  CHECK(snapshot->copied_bytes() == 0);
  std::vector<std::string> read(1);
  CHECK(read_all(*snapshot, read, [] {}));
  keep_snapshots_of({tensor});
  CHECK(snapshot->copied_bytes() == 0);
}

TEST_CASE("views of one tensor have its version") {
  const at::Tensor whole = at::zeros({4, 3});
  const auto snapshot = Snapshot::make({whole.detach().narrow(0, 1, 2)}, {});
  at::Tensor(whole).mul_(2);
  std::vector<std::string> read(1);
  CHECK_FALSE(read_all(*snapshot, read, [] {}));
}

TEST_CASE("a reader, and writers that never rest") {
  int64_t sum = 0;
  for (int save = 0; save < 20; ++save) {
    const std::vector<at::Tensor> tensors{at::zeros({3 * kBlock / 4 + 1}), at::zeros({kBlock / 4})};
    const auto snapshot = Snapshot::make(tensors, {tensors[0]});
    std::atomic<bool> is_over{false};
    std::thread writer([&] {
      for (float value = 1; !is_over; ++value) {
        keep_snapshots_of({tensors[0]});
        for (const at::Tensor& tensor : tensors) {
          auto* data = tensor.mutable_data_ptr<float>();
          for (int64_t i = 0; i < tensor.numel(); ++i) data[i] = value;
          tensor.unsafeGetTensorImpl()->bump_version();
        }
      }
    });
    std::thread other([&] { keep_all_snapshots(); });
    bool is_whole = true;
    for (size_t i = 0; i < tensors.size(); ++i)
      is_whole = snapshot->read(i, [&](int64_t, std::string_view bytes) {
        for (const char byte : bytes) sum += byte;
      }) && is_whole;
    snapshot->close();
    is_over = true;
    writer.join();
    other.join();
    CHECK(is_whole);
  }
  CHECK(sum == 0);
}

}  // namespace trireme::snapshot_test

// Outputs of frozen layers in the memory of a host.

#include <trireme/activation/activation_cache.h>

#include <trireme/activation/cached_prefix.h>

#include <torch/nn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <thread_ranks.h>
#include <vector>

#include "catch_torch.h"

namespace trireme::activation_cache_test {

using torch::nn::Dropout;
using torch::nn::Linear;
using torch::nn::Sequential;
using torch::nn::Tanh;

namespace {

constexpr int64_t kSamples = 12;
const std::vector<uint64_t> kLayers{7, 8, 9};

std::string stored(ActivationCache& cache, CacheRow row, const std::vector<uint64_t>& layers,
                   float value) {
  bool is_other = false;
  auto begun = cache.begin_store(row, layers, is_other);
  if (is_other) return "other input";
  if (!begun) return "not stored";
  std::memcpy(begun->data(), &value, sizeof(value));
  begun->end();
  return "stored";
}

struct Found {
  int64_t depth = 0;
  float value = 0;
  bool operator==(const Found&) const = default;
};

Found found(const ActivationCache& cache, CacheRow row, const std::vector<uint64_t>& layers) {
  Found result;
  result.depth = cache.read(row, layers, reinterpret_cast<std::byte*>(&result.value));
  return result;
}

Sequential frozen_layers(int64_t count = 3) {
  Sequential layers;
  for (int64_t i = 0; i < count; ++i) layers->push_back(Linear(4, 4));
  int64_t number = 0;  // ranks are threads of one generator
  for (at::Tensor& parameter : layers->parameters())
    parameter.set_requires_grad(false).copy_(
        at::sin(at::arange(parameter.numel()) + ++number).view_as(parameter));
  return layers;
}

}  // namespace

TEST_CASE("a record is good for its input and its layers") {
  ActivationCache cache(kSamples, 4096, nullptr);
  CHECK(cache.entries() == 0);
  CHECK(found(cache, {0, 1}, kLayers).depth == 0);
  cache.set_form({{}, at::kFloat});
  cache.set_form({{3}, at::kDouble});  // the first one counts
  CHECK(cache.form() == CacheForm{{}, at::kFloat});
  CHECK(cache.entries() == kSamples);
  CHECK(stored(cache, {0, 1}, {7, 8}, 2.5) == "stored");
  CHECK(stored(cache, {0, 1}, {7, 8}, 3.5) == "not stored");
  CHECK(found(cache, {0, 1}, {7, 8}) == Found{2, 2.5});
  CHECK(found(cache, {0, 1}, kLayers) == Found{2, 2.5});
  CHECK(found(cache, {0, 1}, {7}).depth == 0);
  CHECK(found(cache, {0, 1}, {7, 9}).depth == 0);
  CHECK(found(cache, {1, 1}, {7, 8}).depth == 0);
  CHECK(found(cache, {0, 2}, {7, 8}).depth == ActivationCache::kOtherInput);
  CHECK(stored(cache, {0, 2}, {7, 8}, 1) == "other input");
  CHECK(stored(cache, {0, 1}, kLayers, 4.5) == "stored");
  CHECK(found(cache, {0, 1}, kLayers) == Found{3, 4.5});
}

TEST_CASE("what a rank has begun to write is a miss, also when it never ends") {
  ActivationCache cache(kSamples, 4096, nullptr);
  cache.set_form({{}, at::kFloat});
  bool is_other = false;
  CHECK(stored(cache, {1, 1}, kLayers, 2.5) == "stored");
  const auto dead = cache.begin_store({1, 1}, {7, 8}, is_other);
  REQUIRE(dead.has_value());
  CHECK(found(cache, {1, 1}, kLayers).depth == 0);
  CHECK(stored(cache, {1, 1}, kLayers, 2.5) == "not stored");
  CHECK(stored(cache, {2, 1}, kLayers, 5.5) == "stored");
  CHECK(found(cache, {2, 1}, kLayers) == Found{3, 5.5});
}

TEST_CASE("only ids with room are kept") {
  ActivationCache cache(100, 4096, nullptr);
  cache.set_form({{16}, at::kFloat});
  CHECK(cache.entries() == (4096 - 192) / 128);
  bool is_other = false;
  CHECK(!cache.begin_store({cache.entries(), 1}, kLayers, is_other));
  CHECK(cache.begin_store({cache.entries() - 1, 1}, kLayers, is_other));
  CHECK_THAT(test::error_of([&] { ActivationCache(9, 512, nullptr).set_form({{99}, at::kFloat}); }),
             Catch::Contains("got 512 bytes for rows of 396, expected room for one"));
}

TEST_CASE("ranks that say the form at once all know it") {
  constexpr int64_t kTimes = 5000;
  std::vector<std::unique_ptr<ActivationCache>> caches(kTimes);
  for (auto& cache : caches) {
    cache = std::make_unique<ActivationCache>(kSamples, 4096, nullptr);
    cache->turn_off();  // its memory is there from now on
  }
  const CacheForm form{{2}, at::kFloat};
  std::vector<int64_t> unknown(2);
  std::atomic<int64_t> arrived{0};
  const auto say = [&](size_t thread) {
    for (int64_t i = 0; i < kTimes; ++i) {
      ++arrived;
      while (arrived < 2 * (i + 1)) std::this_thread::yield();
      ActivationCache& cache = *caches[static_cast<size_t>(i)];
      cache.set_form(form);
      unknown[thread] += int64_t{cache.form() != form};
    }
  };
  std::thread other(say, 1);
  say(0);
  other.join();
  CHECK(unknown == std::vector<int64_t>(2));
}

TEST_CASE("a prefix over ranks: one finds what another has stored, and more layers go on") {
  std::vector<CacheStats> stats(2);
  std::vector<int64_t> wrong(2);
  const at::Tensor data = torch::randn({kSamples, 4});
  test::run_thread_ranks(
      2,
      [&](test::ThreadRank& rank) {
        const auto at = static_cast<size_t>(rank.where.rank);
        auto cache = std::make_shared<ActivationCache>(kSamples, 8192, rank.communicator);
        CachedPrefix two(frozen_layers(2), cache, true);
        CachedPrefix three(frozen_layers(3), cache, true);
        const auto check = [&](CachedPrefix& prefix, int64_t count, const at::Tensor& ids) {
          const at::Tensor x = data.index_select(0, ids);
          const at::Tensor expected = frozen_layers(count)->forward(x);
          const at::Tensor found = prefix->forward(x, ids);
          wrong[at] += int64_t{!at::allclose(found, expected, 1e-5, 1e-6)};
          wrong[at] += int64_t{found.requires_grad()};
        };
        const auto meet = [&] { rank.communicator->barrier("next").wait(); };
        const at::Tensor all = torch::arange(kSamples);
        if (rank.where.rank == 0) check(two, 2, all);
        meet();
        check(two, 2, all.flip(0));
        meet();
        check(three, 3, all.chunk(2)[at]);
        meet();
        check(three, 3, all);
        stats[at] = cache->stats();
      },
      std::chrono::seconds(30), test::Engine::kShm);
  CHECK(wrong == std::vector<int64_t>(2));
  CHECK(stats[0].hits == 2 * kSamples);
  CHECK(stats[0].misses == kSamples + kSamples / 2);
  CHECK(stats[1].hits == 2 * kSamples);
  CHECK(stats[1].misses == kSamples / 2);
  CHECK(stats[1].depth == 3);
}

TEST_CASE("what a prefix refuses") {
  auto cache = std::make_shared<ActivationCache>(kSamples, 8192, nullptr);
  const auto refuses = [&](const std::string& text, Sequential layers, const at::Tensor& ids) {
    CachedPrefix prefix(std::move(layers), cache);
    CHECK_THAT(test::error_of([&] { prefix->forward(torch::ones({2, 4}), ids); }),
               Catch::Contains(text));
  };
  const at::Tensor ids = torch::arange(2);
  refuses("got parameter 'layers.0.weight' that is trained", Sequential(Linear(4, 4)), ids);
  refuses("got 'layers.1', a torch::nn::DropoutImpl in training mode",
          Sequential(Tanh(), Dropout()), ids);
  refuses("got id 12, expected 0 to 11", Sequential(Tanh()), ids + 11);
  refuses("got ids of Float", Sequential(Tanh()), torch::ones({2}));
}

}  // namespace trireme::activation_cache_test

// How often parameters get gradients before a step; no group is needed.

#include <trireme/strategies/horovod/pass_counts.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::pass_counts_test {

using horovod::PassCounts;
using test::error_of;

namespace {

// Keeps what is refused, and returns.
struct Refusals {
  std::vector<std::string> texts;
  horovod::Refuse refuse() {
    return [this](const std::string& text) { texts.push_back(text); };
  }
  bool say(const std::string& part) const {
    return !texts.empty() && texts.back().find(part) != std::string::npos;
  }
};

}  // namespace

TEST_CASE("The last pass of a parameter is known, and one more is refused", "[horovod]") {
  Refusals refused;
  PassCounts counts(2, {1, 3});
  counts.begin(3);
  CHECK_FALSE(counts.any());
  CHECK_FALSE(counts.count(0, "w", refused.refuse()));
  CHECK_FALSE(counts.count(2, "b", refused.refuse()));  // by parameter
  CHECK(counts.count(0, "w", refused.refuse()));
  CHECK(counts.any());
  CHECK(refused.texts.empty());
  // Throws even if `refuse` returns.
  const std::string text = error_of([&] { counts.count(0, "w", refused.refuse()); });
  CHECK(text.find("'w' has had 2 of 2 (rank 1 of 3)") != std::string::npos);
  CHECK(refused.say("more than backward_passes_per_step times"));
  CHECK(counts.count(2, "b", refused.refuse()));  // the other one is not over
}

TEST_CASE("What waits for a step is not dropped, nor counted otherwise", "[horovod]") {
  Refusals refused;
  PassCounts counts(1, {0, 2});
  counts.begin(1);
  counts.check_zero_grad(refused.refuse());
  counts.set_passes_per_step(2, refused.refuse());
  CHECK(refused.texts.empty());
  CHECK_FALSE(counts.count(0, "w", refused.refuse()));
  counts.check_zero_grad(refused.refuse());
  CHECK(refused.say("zero_grad() was called after loss.backward()"));
  counts.set_passes_per_step(1, refused.refuse());
  CHECK(refused.say("another backward_passes_per_step"));
  counts.forget();
  CHECK_FALSE(counts.any());
}

TEST_CASE("A step has one backward at least", "[horovod]") {
  CHECK(error_of<c10::ValueError>([] {
          PassCounts(0, {0, 1});
        }).find("backward_passes_per_step=0") != std::string::npos);
  PassCounts counts(1, {0, 1});
  CHECK(error_of<c10::ValueError>([&] {
          counts.set_passes_per_step(-1, {});
        }).find("backward_passes_per_step=-1") != std::string::npos);
}

}  // namespace trireme::pass_counts_test

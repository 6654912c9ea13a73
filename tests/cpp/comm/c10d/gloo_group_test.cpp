#include <catch_torch.h>
#include <csignal>
#include <thread_ranks.h>

namespace trireme::gloo_group_test {

using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;

namespace {

using Handler = void (*)(int);

// What SIGPIPE does once two ranks have made a group over Gloo where it did `before`.
Handler after_a_group(Handler before) {
  const Handler found = std::signal(SIGPIPE, before);
  run_thread_ranks(2, [](ThreadRank&) {});
  return std::signal(SIGPIPE, found);
}

}  // namespace

TEST_CASE("a write of Gloo to a peer that has died does not end the process") {
  CHECK(after_a_group(SIG_DFL) == SIG_IGN);
}

TEST_CASE("what a program lets SIGPIPE do stays when it makes a group over Gloo") {
  const Handler own = [](int) {};
  CHECK(after_a_group(own) == own);
}

}  // namespace trireme::gloo_group_test

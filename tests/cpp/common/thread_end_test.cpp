#include <trireme/common/thread_end.h>

#include <catch_torch.h>
#include <string>
#include <thread>

namespace trireme::thread_end_test {

namespace {

thread_local std::string* gone = nullptr;

// Is what a library keeps for a thread.
struct Kept {
  ~Kept() { *gone += "kept "; }
};

}  // namespace

TEST_CASE("A thread's last calls come in reverse order, before what is kept for it goes") {
  std::string seen;
  std::thread thread([&] {
    gone = &seen;
    at_thread_end([&] { seen += "first "; });
    thread_local Kept kept;
    (void)kept;
    at_thread_end([&] {
      seen += "second ";
      at_thread_end([&] { seen += "third "; });
    });
    end_thread();
  });
  thread.join();
  CHECK(seen == "second third first kept ");
}

}  // namespace trireme::thread_end_test

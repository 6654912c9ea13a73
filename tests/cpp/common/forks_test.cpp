// Shared memory in a forked child.

#include <trireme/common/forks.h>

#include <catch_torch.h>
#include <csignal>
#include <functional>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace trireme::forks_test {

namespace {

constexpr size_t kMappedBytes = 3 * 4096 - 100;  // no whole number of pages

// Is memory as two processes see it: two mappings of one file.
struct SharedBytes {
  int fd = ::memfd_create("trireme_test", MFD_CLOEXEC);
  char* first = nullptr;
  char* second = nullptr;

  SharedBytes() {
    REQUIRE(::ftruncate(fd, kMappedBytes) == 0);
    for (char** mapped : {&first, &second}) {
      void* found = ::mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      REQUIRE(found != MAP_FAILED);
      *mapped = static_cast<char*>(found);
    }
  }
  ~SharedBytes() {
    ::munmap(first, kMappedBytes);
    ::munmap(second, kMappedBytes);
    ::close(fd);
  }
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;
};

// The status with which a child ends that runs `program`: its result, or a signal.
int in_child(const std::function<int()>& program) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);  // Catch's would report a failure
    ::_exit(program());
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return status;
}

}  // namespace

TEST_CASE("a child writes its own copy, and inherits it to its own children") {
  SharedBytes shared;
  shared.first[5] = 1;
  {
    const PrivateInChildren guard(shared.first, kMappedBytes, shared.fd);
    const int status = in_child([&] {
      if (shared.first[5] != 1) return 1;
      shared.first[5] = 2;
      shared.first[kMappedBytes - 1] = 3;
      const int inner = in_child([&] {
        const bool inherited = shared.first[5] == 2 && shared.first[kMappedBytes - 1] == 3;
        shared.first[5] = 4;
        return inherited ? 0 : 1;
      });
      return inner == 0 && shared.first[5] == 2 && shared.second[5] == 1 ? 0 : 2;
    });
    CHECK(status == 0);
    CHECK(shared.first[5] == 1);
    CHECK(shared.second[kMappedBytes - 1] == 0);
    shared.first[6] = 9;
    CHECK(shared.second[6] == 9);  // the parent's is as it was
  }
  CHECK(in_child([&] { return (shared.first[5] = 6) == 6 ? 0 : 1; }) == 0);
  CHECK(shared.second[5] == 6);
}

TEST_CASE("where a program has closed the file, its child reads and may not write") {
  SharedBytes shared;
  shared.first[0] = 1;
  const int kept = ::dup(shared.fd);
  const int number = ::dup(shared.fd);
  const PrivateInChildren guard(shared.first, kMappedBytes, number);
  ::close(number);
  const int another = ::memfd_create("trireme_other", MFD_CLOEXEC);  // under the same number
  CHECK(another == number);
  CHECK(in_child([&] { return shared.first[0] == 1 ? 0 : 1; }) == 0);
  const int status = in_child([&] {
    shared.first[0] = 2;
    return 0;
  });
  CHECK(WIFSIGNALED(status));
  CHECK(shared.second[0] == 1);
  ::close(another);
  ::close(kept);
}

}  // namespace trireme::forks_test

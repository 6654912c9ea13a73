// Saves onto a disk that fails in the middle. The calls of the C library that write are this
// program's own here: they do what those do, until a test has them fail.

#include <trireme/comm/threads/thread_group.h>
#include <trireme/saving/module_checkpoint.h>

#include <torch/nn/modules/linear.h>

#include <atomic>
#include <catch_torch.h>
#include <cerrno>
#include <cstdarg>
#include <fcntl.h>
#include <string>
#include <sys/syscall.h>
#include <temporary_folder.h>
#include <unistd.h>

namespace trireme::faulty_disk_test {

namespace {

// The calls that fail from some moment on, and how; 0: none.
struct Faults {
  std::atomic<int> pwrite{0};
  std::atomic<int> fsync{0};
  std::atomic<int> create{0};
  std::atomic<int64_t> writes_before{0};  // that are still done
};

Faults& faults() {
  static Faults all;
  return all;
}

}  // namespace

}  // namespace trireme::faulty_disk_test

using trireme::faulty_disk_test::faults;

#pragma GCC visibility push(default)  // libraries find these in the place of libc's
extern "C" {

ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  if (faults().pwrite != 0 && --faults().writes_before < 0) {
    errno = faults().pwrite;
    return -1;
  }
  return ::syscall(SYS_pwrite64, descriptor, data, bytes, offset);
}

int fsync(int descriptor) {
  if (faults().fsync != 0) {
    errno = faults().fsync;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const bool has_mode = (flags & (O_CREAT | O_TMPFILE)) != 0;
  const unsigned mode = has_mode ? va_arg(more, unsigned) : 0;
  va_end(more);
  if (faults().create != 0 && (flags & O_CREAT) != 0) {
    errno = faults().create;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

}  // extern "C"
#pragma GCC visibility pop

namespace trireme::faulty_disk_test {

using trireme::test::error_of;
using trireme::test::TemporaryFolder;

TEST_CASE("a disk that fails in the middle of a save costs that save alone") {
  struct Case {
    std::string what;
    std::atomic<int>& call;
    int error;
    int64_t writes_before;
    std::string told;
  };
  const Case cases[] = {
      {"a write", faults().pwrite, EIO, 0, "Input/output error"},
      {"a later write", faults().pwrite, EIO, 2, "Input/output error"},
      {"a sync", faults().fsync, EIO, 0, "Input/output error"},
      {"a folder that has turned read-only", faults().create, EROFS, 0, "Read-only file system"},
  };
  const TemporaryFolder folder;
  const std::string path = folder.at("checkpoint");
  torch::nn::Linear net(30, 30);
  const at::NoGradGuard no_grad;
  const auto alone = ThreadGroup(1).communicator(0);
  save_checkpoint(path, *net, {.communicator = alone}).wait();
  const at::Tensor saved = net->weight.clone();
  for (const Case& one : cases) {
    for (const bool asynchronous : {false, true}) {
      INFO(one.what << ", asynchronous " << asynchronous);
      net->weight.add_(1);
      faults().writes_before = one.writes_before;
      one.call = one.error;
      const std::string error = error_of([&] {
        save_checkpoint(path, *net, {.communicator = alone, .asynchronous = asynchronous}).wait();
      });
      one.call = 0;
      INFO(error);
      CHECK(error.find(one.told) != std::string::npos);
      CHECK(error.find("checkpoint.saving") != std::string::npos);
      torch::nn::Linear other(30, 30);
      load_checkpoint(path, *other, {.communicator = alone});
      CHECK(at::equal(other->weight, saved));
    }
  }
  save_checkpoint(path, *net, {.communicator = alone, .asynchronous = true}).wait();
  load_checkpoint(path, *net, {.communicator = alone});
  CHECK_FALSE(at::equal(net->weight, saved));
}

}  // namespace trireme::faulty_disk_test

#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <shm/shm_ranks.h>
#include <stdexcept>
#include <string>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace trireme::shm::test {

struct Failure {
  FaultKind kind = FaultKind::kMismatch;
  std::string text;
};

inline Failure failure_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Fault& fault) {
    return {fault.kind(), fault.what()};
  }
  return {FaultKind::kMismatch, "no fault"};
}

inline void sum(Collectives& collectives, size_t numel, std::string_view label = {},
                std::chrono::milliseconds timeout = {}) {
  std::vector<float> values(numel, 1);
  collectives.all_reduce(pieces_of(values), {}, {.timeout = timeout, .label = label});
}

inline bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

// A rank in a process of its own: the parent is rank 0. Texts go through a file per key.
class FolderExchange final : public Exchange {
 public:
  FolderExchange() {
    char name[] = "/tmp/trireme_test_XXXXXX";
    folder_ = ::mkdtemp(name);
  }
  explicit FolderExchange(const std::string& folder) : folder_(folder) {}
  void remove() const { [[maybe_unused]] const int rc = ::system(("rm -r " + folder_).c_str()); }
  void put(const std::string& key, const std::string& text) override {
    const std::string path = path_of(key);
    FILE* file = ::fopen((path + ".part").c_str(), "w");
    ::fwrite(text.data(), 1, text.size(), file);
    ::fclose(file);
    ::rename((path + ".part").c_str(), path.c_str());
  }
  std::string get(const std::string& key) override {
    for (int i = 0; i < 20'000; ++i) {
      if (FILE* file = ::fopen(path_of(key).c_str(), "r")) {
        char text[4096];
        const size_t length = ::fread(text, 1, sizeof(text), file);
        ::fclose(file);
        return {text, length};
      }
      ::usleep(1000);
    }
    throw std::runtime_error("nobody put " + key);
  }

 private:
  std::string path_of(std::string key) const {
    for (char& letter : key) letter = letter == '/' ? '_' : letter;
    return folder_ + "/" + key;
  }
  std::string folder_;
};

// Runs `child` as rank 1 of 2 in a forked process, `parent` as rank 0 here.
inline void run_two_processes(const std::function<void(ShmRank&)>& child,
                              const std::function<void(ShmRank&, pid_t)>& parent,
                              std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  FolderExchange exchange;
  const pid_t pid = ::fork();
  const int64_t rank = pid == 0 ? 1 : 0;
  {
    const auto group = HostGroup::join(exchange, {{rank, 2}, timeout});
    Collectives collectives(*group);
    ShmRank self{rank, *group, collectives};
    if (pid == 0) {
      child(self);
      ::_exit(0);
    }
    parent(self, pid);
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  exchange.remove();
}

}  // namespace trireme::shm::test

#pragma once

#include <trireme/comm/group_health.h>
#include <trireme/comm/pending.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace trireme {

// A wait that goes well ends long before the first look at the board; after that the looks are as
// rare as a person can bear.
inline constexpr std::chrono::milliseconds kFirstLook{1000};
inline constexpr std::chrono::milliseconds kNextLook{250};

// Runs `call`; rethrows its errors as a c10::DistBackendError naming `operation`.
void rethrow_named(const std::string& operation, GroupHealth& health,
                   const std::function<void()>& call);

// The name of an awaited operation, and its place among the group's operations (comm/progress.h), 0
// if it is not counted.
struct AwaitedOperation {
  std::string name;
  int64_t number = 0;
};

// Waits for `work`, watching what peers announce; throws c10::DistBackendError naming the
// operation.
void wait_for_work(c10d::Work& work, bool on_cpu, const AwaitedOperation& operation,
                   GroupHealth& health);

// Waits as wait_for_work() does, for the Future that a communication hook returned.
void wait_for_future(c10::ivalue::Future& future, const std::string& operation,
                     GroupHealth& health);

}  // namespace trireme

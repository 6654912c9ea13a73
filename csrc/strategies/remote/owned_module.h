#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/serving_threads.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace trireme::remote {

// One module of this process, for all its callers. Forwards of one mode, training or not, run side
// by side; a step, a load, or a copy of the state runs alone.
class TRIREME_API OwnedModule {
 public:
  explicit OwnedModule(std::shared_ptr<ModuleBody> body) : body_(std::move(body)) {}

  ModuleBody& body() { return *body_; }

  // A guard for a use of the module. Its wait lets other calls of `threads` run, and gives up with
  // c10::DistBackendError at `until`.
  class TRIREME_API Use {
   public:
    struct Wait {
      ServingThreads& threads;
      shm::Clock::time_point until;
    };
    // With a mode, for a forward; without one, for a use that runs alone.
    Use(OwnedModule& module, std::optional<bool> training, const Wait& wait);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OwnedModule& module_;
    bool alone_;
  };

  // Counts a graph that uses the present parameters, as long as it lives.
  class TRIREME_API InFlight {
   public:
    explicit InFlight(std::shared_ptr<OwnedModule> module);
    ~InFlight();
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

   private:
    std::shared_ptr<OwnedModule> module_;
  };
  // Returns whether any graph would see a write in place.
  bool is_in_flight() const;

 private:
  std::shared_ptr<ModuleBody> body_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t forwards_ = 0;
  bool is_alone_ = false;
  std::optional<bool> training_;
  int64_t in_flight_ = 0;
};

// Finds the one OwnedModule of each module. Thread-safe.
class TRIREME_API OwnedModules {
 public:
  std::shared_ptr<OwnedModule> of(std::shared_ptr<ModuleBody> body);

 private:
  std::mutex mutex_;
  std::map<const void*, std::weak_ptr<OwnedModule>> all_;
};

}  // namespace trireme::remote

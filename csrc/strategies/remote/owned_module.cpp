#include <trireme/strategies/remote/owned_module.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme::remote {

OwnedModule::Use::Use(OwnedModule& module, std::optional<bool> training, const Wait& wait)
    : module_(module), alone_(!training) {
  std::unique_lock lock(module.mutex_);
  const auto may_begin = [&] {
    if (module.is_alone_) return false;
    if (alone_) return module.forwards_ == 0;
    // A nested forward must not wait for a step that waits for its outer forward.
    return module.forwards_ == 0 || module.training_ == training;
  };
  if (!may_begin()) {
    lock.unlock();
    const ServingThreads::Pause pause(wait.threads);
    lock.lock();
    if (!module.changed_.wait_until(lock, wait.until, may_begin))
      C10_THROW_ERROR(DistBackendError,
                      error_text("remote", "got no turn at the module: other callers use it", {},
                                 "Pass a longer timeout=."));
  }
  if (alone_) {
    module.is_alone_ = true;
    return;
  }
  if (module.training_ != training) {
    module.is_alone_ = true;  // so that no forward runs while the mode changes
    lock.unlock();
    try {
      module.body_->set_training(*training);
    } catch (...) {
      lock.lock();
      module.is_alone_ = false;
      module.training_.reset();
      module.changed_.notify_all();
      throw;
    }
    lock.lock();
    module.is_alone_ = false;
    module.training_ = training;
    module.changed_.notify_all();
  }
  ++module.forwards_;
}

OwnedModule::Use::~Use() {
  const std::lock_guard lock(module_.mutex_);
  if (alone_) {
    module_.is_alone_ = false;
  } else {
    --module_.forwards_;
  }
  module_.changed_.notify_all();
}

OwnedModule::InFlight::InFlight(std::shared_ptr<OwnedModule> module) : module_(std::move(module)) {
  const std::lock_guard lock(module_->mutex_);
  ++module_->in_flight_;
}

OwnedModule::InFlight::~InFlight() {
  const std::lock_guard lock(module_->mutex_);
  --module_->in_flight_;
}

bool OwnedModule::is_in_flight() const {
  const std::lock_guard lock(mutex_);
  return in_flight_ > 0;
}

std::shared_ptr<OwnedModule> OwnedModules::of(std::shared_ptr<ModuleBody> body) {
  const std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& entry) { return entry.second.expired(); });
  auto& there = all_[body->identity()];
  if (auto module = there.lock()) return module;
  auto made = std::make_shared<OwnedModule>(std::move(body));
  there = made;
  return made;
}

}  // namespace trireme::remote

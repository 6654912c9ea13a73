#include <trireme/activation/forward_state.h>

#include <trireme/module/replica_random.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

namespace trireme {

class ForwardStateGuard::Replica {
 public:
  explicit Replica(const at::Generator& generator) : guard_(generator.clone()) {}

 private:
  ReplicaRandomGuard guard_;
};

ForwardState ForwardState::capture(bool with_random, const std::vector<at::Tensor>& inputs) {
  ForwardState state;
  std::vector<c10::Device> devices;
  for (const at::Tensor& input : inputs) {
    const bool counts = input.defined() && !input.is_cpu() && !input.is_meta();
    if (counts && std::find(devices.begin(), devices.end(), input.device()) == devices.end()) {
      devices.push_back(input.device());
    }
  }
  if (with_random) {
    if (ReplicaRandomGuard* replica = ReplicaRandomGuard::current()) {
      state.replica_ = replica->generator().clone();
    } else {
      state.cpu_random_ = cpu_random();
    }
    for (const c10::Device device : devices) {
      state.random_.push_back(random_of(at::globalContext().defaultGenerator(device)));
    }
  }
  std::vector<c10::DeviceType> types{c10::DeviceType::CPU};
  for (const c10::Device device : devices) {
    if (std::find(types.begin(), types.end(), device.type()) == types.end()) {
      types.push_back(device.type());
    }
  }
  // The function may move CPU inputs to the accelerator.
  if (const auto accelerator = at::getAccelerator(); accelerator && devices.empty()) {
    types.push_back(*accelerator);
  }
  for (const c10::DeviceType type : types) {
    state.autocast_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  }
  state.caches_casts_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

ForwardState::CpuRandom ForwardState::cpu_random() {
  auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  const std::lock_guard lock(generator->mutex_);
  return {generator->engine(), generator->next_float_normal_sample(),
          generator->next_double_normal_sample()};
}

ForwardState::Random ForwardState::random_of(const at::Generator& generator) {
  at::Generator same = generator;
  const std::lock_guard lock(same.mutex());
  return {generator, generator.get_state()};
}

ForwardState ForwardState::present() const {
  ForwardState state;
  if (cpu_random_) {
    state.cpu_random_ = cpu_random();
  }
  for (const Random& random : random_) {
    state.random_.push_back(random_of(random.generator));
  }
  for (const Autocast& autocast : autocast_) {
    state.autocast_.push_back({autocast.device, at::autocast::is_autocast_enabled(autocast.device),
                               at::autocast::get_autocast_dtype(autocast.device)});
  }
  state.caches_casts_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void ForwardState::restore() const {
  if (cpu_random_) {
    const at::Generator& random = at::detail::getDefaultCPUGenerator();
    auto* generator = at::check_generator<at::CPUGeneratorImpl>(random);
    const std::lock_guard lock(generator->mutex_);
    generator->set_engine(cpu_random_->engine);
    generator->set_next_float_normal_sample(cpu_random_->next_float);
    generator->set_next_double_normal_sample(cpu_random_->next_double);
  }
  for (const Random& random : random_) {
    at::Generator generator = random.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(random.state);
  }
  for (const Autocast& autocast : autocast_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.is_enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_casts_);
}

ForwardStateGuard::ForwardStateGuard(const ForwardState& state) : before_(state.present()) {
  if (state.replica_) {
    replica_ = std::make_unique<Replica>(*state.replica_);
  }
  at::autocast::increment_nesting();
  state.restore();
}

ForwardStateGuard::~ForwardStateGuard() {
  // Casts cached in this scope belong to graphs of the recomputation.
  if (at::autocast::decrement_nesting() == 0) {
    at::autocast::clear_cache();
  }
  before_.restore();
}

}  // namespace trireme

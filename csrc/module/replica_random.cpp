#include <trireme/module/replica_random.h>

#include <trireme/common/error.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

namespace trireme {
namespace {

constexpr auto kKey = c10::DispatchKey::DeferredInit;

thread_local ReplicaRandomGuard* innermost = nullptr;

bool takes_generator(const c10::FunctionSchema& schema, size_t& place) {
  for (place = 0; place < schema.arguments().size(); ++place) {
    const c10::TypePtr& type = schema.arguments()[place].real_type();
    if (type->str() == "Generator?") return true;
  }
  return false;
}

// Returns whether an operation runs on the CPU, by the device of its tensors, or the one that it
// was asked for.
bool is_on_cpu(const std::vector<c10::IValue>& stack, size_t arguments) {
  for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined()) return stack[i].toTensor().is_cpu();
    if (stack[i].isDevice()) return stack[i].toDevice().is_cpu();
  }
  return true;
}

void draw_for_replica(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      std::vector<c10::IValue>* stack) {
  const size_t arguments = op.schema().arguments().size();
  size_t place = 0;
  if (innermost != nullptr && takes_generator(op.schema(), place)) {
    c10::IValue& given = (*stack)[stack->size() - arguments + place];
    const bool is_process =
        given.isNone() || given.toGenerator() == at::detail::getDefaultCPUGenerator();
    if (is_process && is_on_cpu(*stack, arguments)) given = innermost->generator();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

uint64_t PassRandom::seed() {
  const std::lock_guard lock(mutex_);
  if (!seed_) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();  // no copy of it
    const std::lock_guard generator_lock(generator.mutex());
    seed_ = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
  }
  return *seed_;
}

ReplicaRandomGuard::ReplicaRandomGuard(PassRandom* pass, size_t replica)
    : pass_(pass),
      replica_(replica),
      outer_(innermost),
      included_(c10::impl::tls_is_dispatch_key_included(kKey)) {
  innermost = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

ReplicaRandomGuard::ReplicaRandomGuard(at::Generator generator) : ReplicaRandomGuard(nullptr, 0) {
  generator_ = std::move(generator);
}

ReplicaRandomGuard* ReplicaRandomGuard::current() { return innermost; }

ReplicaRandomGuard::~ReplicaRandomGuard() {
  innermost = outer_;
  c10::impl::tls_set_dispatch_key_included(kKey, included_);
}

const at::Generator& ReplicaRandomGuard::generator() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      pass_ != nullptr || generator_.defined(),
      error_text("data_parallel",
                 "got a random operator in the backward of replica " + std::to_string(replica_) +
                     " on the CPU, expected none: torch's activation checkpoint cannot "
                     "repeat what its forward drew",
                 {}, "Use trireme::checkpoint."));
  // mt19937 is seeded with 32 bits.
  if (!generator_.defined())
    generator_ = at::detail::createCPUGenerator(
        static_cast<uint32_t>(pass_->seed() + replica_ * uint64_t{0x9E3779B9}));
  return generator_;
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    size_t place = 0;
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !takes_generator(op->schema(), place)) continue;
    const std::string full =
        name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_for_replica>());
  }
}

}  // namespace trireme

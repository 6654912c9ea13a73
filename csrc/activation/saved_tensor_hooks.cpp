#include <trireme/activation/saved_tensor_hooks.h>

#include <trireme/common/error.h>
#include <trireme/common/worker_pool.h>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <memory>
#include <typeinfo>
#include <utility>
#include <vector>

namespace trireme {
namespace {

thread_local std::vector<c10::intrusive_ptr<SavedTensorPacker>> packers;

class PackingHooks : public torch::autograd::SavedVariableHooks {
 public:
  explicit PackingHooks(c10::intrusive_ptr<SavedTensorPacker> packer)
      : packer_(std::move(packer)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    packed_ = packer_->pack(tensor);
    packer_.reset();  // the graph must not keep the packer alive
    if (!packed_) {
      throw StopRecomputation{};
    }
  }

  at::Tensor call_unpack_hook() override { return packed_->unpack(); }

 private:
  c10::intrusive_ptr<SavedTensorPacker> packer_;
  c10::intrusive_ptr<PackedSavedTensor> packed_;
};

// An engine whose default hooks are the top of the stack of packers; torch's C++ engine has none.
class PackingEngine : public torch::autograd::Engine {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (packers.empty()) {
      return nullptr;
    }
    return std::make_unique<PackingHooks>(packers.back());
  }

  static Engine& get() {
    static Engine* engine = start();  // its threads outlive static objects
    return *engine;
  }

 private:
  // Torch starts the device threads of one engine only, the first that runs a backward. Torch's own
  // engine is made that one here, so that ours are started exactly once, below.
  static Engine* start() {
    get_base_engine().initialize_device_threads_pool();
    auto* engine = new PackingEngine;
    engine->start_device_threads();
    return engine;
  }
};

class CppHooks : public SavedTensorHooks {
 public:
  void push(c10::intrusive_ptr<SavedTensorPacker> packer) override {
    static const bool is_installed = install();
    static_cast<void>(is_installed);
    packers.push_back(std::move(packer));
  }

  void pop() override { packers.pop_back(); }

  std::function<std::shared_ptr<void>()> carried() override {
    if (packers.empty() || packers.back()->is_ordered()) return {};
    return [packer = packers.back()] { return std::make_shared<PackerGuard>(packer); };
  }

 private:
  static bool install() {
    const auto& engine = torch::autograd::Engine::get_default_engine();
    TORCH_CHECK_NOT_IMPLEMENTED(
        typeid(engine) == typeid(torch::autograd::Engine),
        error_text("checkpoint",
                   "got an autograd engine that another library has installed, such as that of "
                   "libtorch_python, expected torch's own",
                   {}, "In a process with Python, import trireme there first."));
    torch::autograd::set_default_engine_stub(&PackingEngine::get);
    carry_to_workers([] { return SavedTensorHooks::get().carried(); });
    return true;
  }
};

std::atomic<SavedTensorHooks*> registered{nullptr};

}  // namespace

std::vector<c10::intrusive_ptr<PackedSavedTensor>> SavedTensorPacker::pack_inputs(
    const std::vector<at::Tensor>& inputs, const std::string& /*function*/) {
  std::vector<c10::intrusive_ptr<PackedSavedTensor>> packed(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined()) packed[i] = pack(inputs[i]);
  return packed;
}

int64_t SavedTensorHooks::current_task() {
  static std::atomic<int64_t> outside{-1};
  const int64_t task = torch::autograd::get_current_graph_task_id();
  return task >= 0 ? task : outside.fetch_sub(1);
}

bool SavedTensorHooks::is_stop(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const StopRecomputation&) {
    return true;
  } catch (...) {
    return false;
  }
}

SavedTensorHooks& SavedTensorHooks::get() {
  static CppHooks own;
  SavedTensorHooks* hooks = registered.load();
  return hooks != nullptr ? *hooks : own;
}

void SavedTensorHooks::use(SavedTensorHooks& hooks) {
  registered = &hooks;
  carry_to_workers([] { return get().carried(); });
}

PackerGuard::PackerGuard(c10::intrusive_ptr<SavedTensorPacker> packer)
    : packer_(std::move(packer)) {
  SavedTensorHooks::get().push(packer_);
  if (packer_->watches_operators()) watch_.emplace();
}

PackerGuard::~PackerGuard() {
  watch_.reset();
  SavedTensorHooks::get().pop();
  packer_->end();
}

}  // namespace trireme

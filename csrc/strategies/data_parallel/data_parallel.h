#pragma once

#include <trireme/module/for_each_tensor.h>
#include <trireme/module/nested_tensors.h>
#include <trireme/strategies/data_parallel/parallel_functions.h>
#include <trireme/strategies/data_parallel/replicated_module.h>

#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace trireme {

// See DataParallel below.
template <typename M>
class DataParallelImpl final : public ReplicatedModule {
 public:
  using Net = NetIn<M>;

  explicit DataParallelImpl(M module, DataParallelOptions options = {})
      : ReplicatedModule(module_pointer(module), std::move(options)), module_(std::move(module)) {}

  // Runs the replicas on their parts of the batch, whose size the first tensor with dimensions
  // tells, and puts the outputs together. Arguments and outputs are tensors, or vectors, arrays,
  // pairs, tuples, maps and optionals of them; any other argument is copied to each replica, of any
  // other output replica 0's comes back. 0-dim tensors go to all, and come back as a vector;
  // undefined ones stay so. Without a tensor, replica 0 runs alone.
  template <typename... Args>
  auto forward(Args&&... args) {
    static_assert((!kCannotBeCut<std::decay_t<Args>> && ...),
                  "pack sequences inside of forward, pass a std::vector for a TensorList, and in "
                  "containers tensors by value");
    std::tuple<std::decay_t<Args>...> values(std::forward<Args>(args)...);
    using Output = decltype(call<Args...>(std::declval<Net&>(), values));
    static_assert(!std::is_void_v<Output>, "forward returns what is to be put together");
    const auto turn = take_turn();
    if (get_ready()) {
      bring_to(devices().front(), values);
      Output output = call<Args...>(net(), values);
      bring_to(output_device(), output);
      return output;
    }
    const std::shared_ptr<ReplicaPass> pass = begin(rows_in(values));
    auto parts = cut(*pass, values);
    auto outputs = run<Output>(*pass, [&](size_t position) {
      return call<Args...>(net(*pass, position), parts[position]);
    });
    return put_together(*pass, outputs);
  }

  // Returns the mean over the batch of loss_function(module->forward(inputs...), target): a 0-dim
  // tensor, the mean over its rows. Each replica computes it from its parts of inputs and target,
  // so that outputs stay where they are; what `loss_function` captures, it reads from several
  // threads.
  template <typename LossFunction, typename Target, typename... Args>
  at::Tensor loss(const LossFunction& loss_function, Target&& target, Args&&... inputs) {
    static_assert((!kCannotBeCut<std::decay_t<Args>> && ...) && !kCannotBeCut<std::decay_t<Target>>,
                  "pack sequences inside of forward, pass a std::vector for a TensorList, and in "
                  "containers tensors by value");
    std::tuple<std::decay_t<Args>...> values(std::forward<Args>(inputs)...);
    std::decay_t<Target> wanted(std::forward<Target>(target));
    const auto turn = take_turn();
    if (get_ready()) {
      bring_to(devices().front(), values);
      bring_to(devices().front(), wanted);
      return at::Tensor(loss_function(call<Args...>(net(), values), wanted)).to(output_device());
    }
    const std::shared_ptr<ReplicaPass> pass = begin(rows_in(values, wanted));
    auto parts = cut(*pass, values);
    auto targets = cut(*pass, wanted);
    auto losses = run<at::Tensor>(*pass, [&](size_t position) {
      return at::Tensor(
          loss_function(call<Args...>(net(*pass, position), parts[position]), targets[position]));
    });
    std::vector<std::vector<at::Tensor>> gathered;
    for (const std::optional<at::Tensor>& part : losses) gathered.push_back({*part});
    return mean_loss(*pass, std::move(gathered));
  }

  // Returns the module, whose parameters an optimizer steps.
  M& module() { return module_; }

  // Returns a clone of the module in a DataParallel of its own.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override {
    return std::make_shared<DataParallelImpl>(
        M(std::dynamic_pointer_cast<Net>(clone_of_module(device))), options());
  }

 private:
  // The type of an argument as the caller gave it, but for arrays, which are copied as pointers.
  template <typename Arg>
  using Passed =
      std::conditional_t<std::is_array_v<std::remove_reference_t<Arg>>, std::decay_t<Arg>&&, Arg&&>;

  template <typename... Args>
  static auto call(Net& net, std::tuple<std::decay_t<Args>...>& values) {
    return std::apply(
        [&](auto&... piece) { return net.forward(static_cast<Passed<Args>>(piece)...); }, values);
  }

  Net& net() { return *module_pointer(module_); }
  Net& net(const ReplicaPass& pass, size_t position) const {
    return dynamic_cast<Net&>(replica(pass, position));
  }

  template <typename T>
  static void bring_to(c10::Device device, T& value) {
    for_each_tensor(value, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = tensor.to(device, /*non_blocking=*/true);
    });
  }

  template <typename... T>
  int64_t rows_in(T&... values) const {
    const at::Tensor* first = nullptr;
    const auto look = [&](const at::Tensor& tensor) {
      if (first == nullptr && tensor.defined() && tensor.dim() > 0) first = &tensor;
    };
    (for_each_tensor(values, look), ...);
    return rows_of(first);
  }

  // Returns the part of `value` for each chunk. `value` is not the same afterwards.
  template <typename T>
  std::vector<T> cut(ReplicaPass& pass, T& value) const {
    const size_t chunks = pass.chunks().size();
    std::vector<std::vector<at::Tensor>> parts;  // [tensor][chunk]
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      parts.push_back(tensor.defined() ? pass.scatter(tensor, options().dim)
                                       : std::vector<at::Tensor>(chunks));
    });
    std::vector<T> values;
    values.reserve(chunks);
    for (size_t position = 0; position < chunks; ++position) {
      size_t next = 0;
      for_each_tensor(value, [&](at::Tensor& tensor) { tensor = parts[next++][position]; });
      values.push_back(value);
    }
    return values;
  }

  template <typename Output, typename Job>
  std::vector<std::optional<Output>> run(ReplicaPass& pass, const Job& job) {
    std::vector<std::optional<Output>> outputs(pass.chunks().size());
    replicas().forward(pass, [&](size_t position) { outputs[position].emplace(job(position)); });
    return outputs;
  }

  template <typename Output>
  Output put_together(ReplicaPass& pass, std::vector<std::optional<Output>>& outputs) {
    std::vector<const Output*> each;
    for (const std::optional<Output>& output : outputs) each.push_back(&*output);
    TensorsSideBySide tensors(outputs.size(), [&](size_t position) {
      return replicas().describe(pass.chunks()[position].replica);
    });
    tensors.collect(each);
    ReplicaPass::GatherOptions gather_options;
    gather_options.dim = options().dim;
    const std::vector<at::Tensor> whole = pass.gather(tensors.take(), gather_options);
    size_t next = 0;
    for_each_tensor(*outputs.front(), [&](at::Tensor& tensor) { tensor = whole[next++]; });
    return std::move(*outputs.front());
  }

  M module_;
};

// torch.nn.DataParallel for C++ modules, on CPU too: one process, several replicas of a module.
//
//   trireme::DataParallel<Net> model(net);         // no launcher, no ranks
//   auto loss = loss_of(model->forward(input));    // the loop stays as it was
//   loss.backward();
//   optimizer.step();
//
// A forward cuts its inputs along the batch, runs one replica per part, all at the same time, and
// puts the outputs together; backward runs the replicas' at the same time too, and leaves in every
// .grad the sum over the parts, added in the order of the replicas: the same bits in every run.
//
// `Net`: a module holder (TORCH_MODULE) or a shared_ptr to a module, which can be cloned (see
// torch::nn::Cloneable). The wrapper is itself a module that holds `net` under the name "module";
// an optimizer steps the parameters of either. A replica is a clone made once, whose parameters are
// those of `net` where they are on its device, and otherwise copies that are made again after `net`
// was written. As in torch, what forward writes in place to buffers stays for replica 0 and is lost
// for the others (BatchNorm's statistics are those of the first part); other members of a replica
// are its own copies, and what they point to is shared. Replicas draw random numbers of their own;
// see replica_random.h. A single replica is `net` itself.
//
// Cost per step: two thread wake-ups for forward and for backward each; one copy of the outputs
// (none with loss()); one addition per replica but the first for each parameter. On CPU replicas
// take memory for gradients only; each has its share of at::get_num_threads() threads.
//
// Throws ValueError and TypeError for inputs that cannot be cut and outputs that do not fit
// together. What a replica throws comes out of forward() and backward(), naming the replica: a
// c10::Error as it was, any other exception nested in one; the next step works. backward() with
// create_graph throws: trireme::data_parallel() has one graph.
template <typename M>
class DataParallel : public torch::nn::ModuleHolder<DataParallelImpl<M>> {
  using Base = torch::nn::ModuleHolder<DataParallelImpl<M>>;

 public:
  using Base::Base;
  DataParallel(M module, DataParallelOptions options)
      : Base(std::make_shared<DataParallelImpl<M>>(std::move(module), std::move(options))) {}
};

}  // namespace trireme

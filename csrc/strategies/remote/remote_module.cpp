#include <trireme/strategies/remote/remote_module.h>

#include <trireme/common/error.h>
#include <trireme/module/autograd_node.h>
#include <trireme/module/backward_anchors.h>
#include <trireme/module/sends_gradients.h>
#include <trireme/strategies/remote/carried_autocast.h>
#include <trireme/strategies/remote/module_step.h>
#include <trireme/strategies/remote/value_tensors.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <utility>

namespace trireme::remote {
namespace {

CallRequest request_of(const RefPtr& session, Verb verb, const std::string& factory, Values args,
                       std::optional<std::chrono::milliseconds> timeout) {
  CallRequest request;
  request.call_object(session);
  request.timeout = timeout;
  request.message.verb = verb;
  request.message.name = factory;
  request.message.args = std::move(args);
  return request;
}

template <typename T>
const T& item(const Value& value, size_t place, size_t count) {
  const auto* tuple = value.get_if<Tuple>();
  const T* found =
      tuple != nullptr && tuple->items.size() == count ? tuple->items[place].get_if<T>() : nullptr;
  if (found == nullptr) refuse_message("of another form");
  return *found;
}

// The backward of one forward of a remote module, at its caller.
class RemoteBackward final : public torch::autograd::Node, public SendsGradients {
 public:
  struct Call {
    std::shared_ptr<RpcAgent> agent;
    RefPtr session;
    std::string factory;
    std::optional<std::chrono::milliseconds> timeout;
    int64_t forward;
  };
  RemoteBackward(Call call, torch::autograd::edge_list edges)
      : Node(std::move(edges)), call_(std::move(call)) {}
  ~RemoteBackward() override { forget(); }

  std::string name() const override { return "RemoteBackward"; }
  void release_variables() override { forget(); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                error_text("remote", "got a backward with create_graph=True", call_.agent->where(),
                           "Take gradients of gradients within the module."));
    TORCH_CHECK(!used_.exchange(true),
                error_text("remote",
                           "Trying to backward through the graph of " + call_.factory +
                               " a second time: its owner has freed it",
                           call_.agent->where(), "Call the module again."));
    List given;
    for (const at::Tensor& gradient : gradients)
      gradient.defined() ? given.items.emplace_back(dense(gradient)) : given.items.emplace_back();
    const Value result = call_.agent->finish(call_.agent->begin(
        request_of(call_.session, Verb::kBackward, call_.factory,
                   {call_.forward, std::move(given), present_autocast()}, call_.timeout)));
    const auto* list = result.get_if<List>();
    if (list == nullptr || list->items.size() > num_outputs()) refuse_message("of another form");
    torch::autograd::variable_list found(num_outputs());
    for (size_t i = 0; i < list->items.size(); ++i)
      if (const auto* gradient = list->items[i].get_if<at::Tensor>()) found[i] = *gradient;
    return found;
  }

 private:
  // Lets the owner free the graph.
  void forget() noexcept {
    if (!used_.exchange(true)) call_.agent->drop(call_.session->address(), call_.forward);
  }

  Call call_;
  std::atomic<bool> used_{false};  // the owner has freed the graph, or will
};

}  // namespace

RemoteModule::RemoteModule(std::shared_ptr<RpcAgent> agent, ModuleRequest request)
    : agent_(std::move(agent)), factory_(std::move(request.factory)), timeout_(request.timeout) {
  CallRequest made{request.to};
  made.timeout = timeout_;
  made.message.verb = Verb::kMakeModule;
  made.message.name = factory_;
  made.message.args.push_back(request.optimizer ? to_value(*request.optimizer) : Value());
  made.message.args.emplace_back(Tuple{std::move(request.args)});
  made.message.args.emplace_back(std::move(request.kwargs));
  const Value result = agent_->finish(agent_->begin(std::move(made)));
  const auto* session = result.get_if<RefPtr>();
  if (session == nullptr) refuse_message("of another form");
  session_ = *session;
}

Value RemoteModule::call(Verb verb, Values args) {
  return agent_->finish(
      agent_->begin(request_of(session_, verb, factory_, std::move(args), timeout_)));
}

Value RemoteModule::forward_values(const Values& args, const Dict& kwargs, bool training) {
  const bool wants_graph = at::GradMode::is_enabled();
  Value inputs = Tuple{args};
  Value keywords = kwargs;
  List wanted;
  torch::autograd::edge_list edges;
  int64_t number = 0;
  const auto look = [&](at::Tensor& tensor) {
    if (wants_graph && tensor.requires_grad()) {
      wanted.items.emplace_back(number);
      edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    }
    ++number;
  };
  change_tensors(inputs, look);
  change_tensors(keywords, look);
  Value answer = call(Verb::kForward, {training, wants_graph, std::move(wanted), std::move(inputs),
                                       std::move(keywords), present_autocast()});
  const auto forward = item<int64_t>(answer, 0, 3);
  const List with_gradient = item<List>(answer, 2, 3);
  Value result = std::move(std::get<Tuple>(answer.content).items[1]);
  if (forward < 0) return result;

  if (const at::Tensor anchor = BackwardAnchors::make(); anchor.defined())
    edges.push_back(torch::autograd::impl::gradient_edge(anchor));
  const auto node = make_node<RemoteBackward>(
      RemoteBackward::Call{agent_, session_, factory_, timeout_, forward}, std::move(edges));
  size_t next = 0;
  number = 0;
  change_tensors(result, [&](at::Tensor& tensor) {
    const auto* wanted_now =
        next < with_gradient.items.size() ? with_gradient.items[next].get_if<int64_t>() : nullptr;
    if (wanted_now != nullptr && *wanted_now == number) {
      torch::autograd::set_history(tensor, node);
      ++next;
    }
    ++number;
  });
  return result;
}

void RemoteModule::step() { call(Verb::kStep, {}); }
void RemoteModule::zero_grad() { call(Verb::kZeroGrad, {}); }

ModuleBody::Named RemoteModule::state() {
  const Value answer = call(Verb::kState, {Value()});
  const auto* state = answer.get_if<Dict>();
  if (state == nullptr) refuse_message("of another form");
  ModuleBody::Named named;
  for (size_t i = 0; i < state->keys.size(); ++i) {
    const auto* name = state->keys[i].get_if<std::string>();
    const auto* tensor = state->values[i].get_if<at::Tensor>();
    if (name == nullptr || tensor == nullptr) refuse_message("of another form");
    named.emplace_back(*name, *tensor);
  }
  return named;
}

at::Tensor RemoteModule::fetch(const std::string& name) {
  const Value answer = call(Verb::kState, {name});
  const auto* state = answer.get_if<Dict>();
  TORCH_CHECK_VALUE(state != nullptr && state->values.size() == 1,
                    error_text("remote", "got '" + name + "', which the module does not have",
                               agent_->where(), "Pass a name of its state dict."));
  return std::get<at::Tensor>(state->values.front().content);
}

void RemoteModule::load(const ModuleBody::Named& values) {
  Dict state;
  for (const auto& [name, tensor] : values) {
    state.keys.emplace_back(name);
    state.values.emplace_back(tensor);
  }
  call(Verb::kLoad, {std::move(state)});
}

std::vector<RemoteParameter> RemoteModule::parameters() {
  const Value answer = call(Verb::kParameters, {});
  const auto* list = answer.get_if<List>();
  if (list == nullptr) refuse_message("of another form");
  std::vector<RemoteParameter> found;
  for (const Value& entry : list->items) {
    RemoteParameter parameter{item<std::string>(entry, 0, 4)};
    for (const Value& size : item<List>(entry, 1, 4).items) {
      const auto* number = size.get_if<int64_t>();
      if (number == nullptr) refuse_message("of another form");
      parameter.sizes.push_back(*number);
    }
    parameter.dtype = static_cast<at::ScalarType>(item<int64_t>(entry, 2, 4));
    parameter.requires_grad = item<bool>(entry, 3, 4);
    found.push_back(std::move(parameter));
  }
  return found;
}

}  // namespace trireme::remote

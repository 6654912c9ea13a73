#include <trireme/strategies/pipeline/split_backward.h>

#include <trireme/activation/checkpoint.h>
#include <trireme/strategies/pipeline/received_node.h>

#include <torch/nn.h>
#include <torch/torch.h>

#include <catch_torch.h>
#include <functional>
#include <string>
#include <vector>

namespace trireme::split_backward_test {

using torch::autograd::AutogradContext;
using torch::autograd::impl::gradient_edge;
using Tensors = std::vector<at::Tensor>;

// Computes outputs of inputs and weights.
using Graph = std::function<Tensors(const Tensors& inputs, const Tensors& weights)>;

struct Gradients {
  Tensors inputs;
  Tensors weights;
};

constexpr int64_t kSize = 4;

at::Tensor numbers(int64_t seed) {
  return at::sin(at::arange(kSize * kSize, at::kDouble) * double(seed + 1))
      .view({kSize, kSize})
      .clone();
}

Tensors inputs() { return {numbers(1), numbers(2)}; }
Tensors weights() {
  Tensors made{numbers(3), numbers(4), numbers(5)};
  for (at::Tensor& weight : made) weight.set_requires_grad(true);
  return made;
}

Gradients in_one_piece(const Graph& graph) {
  Tensors leaves = inputs();
  for (at::Tensor& leaf : leaves) leaf.set_requires_grad(true);
  const Tensors held = weights();
  Tensors outputs = graph({leaves[0] * 1, leaves[1] * 1}, held);
  Tensors roots, values;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad()) continue;
    roots.push_back(output);
    values.push_back(at::ones_like(output));
  }
  torch::autograd::backward(roots, values);
  Gradients found;
  for (const at::Tensor& leaf : leaves) found.inputs.push_back(leaf.grad());
  for (const at::Tensor& weight : held) found.weights.push_back(weight.grad());
  return found;
}

struct Halves {
  Tensors received = inputs();
  Tensors held = weights();
  std::unique_ptr<SplitBackward> split;

  explicit Halves(const Graph& graph, std::vector<bool> needs = {true, true}) {
    NodePtr node = ReceivedNode::put_behind(received, needs);
    Tensors outputs = graph(received, held);
    torch::autograd::edge_list roots;
    Tensors values;
    for (const at::Tensor& output : outputs) {
      if (!output.requires_grad()) continue;
      roots.push_back(gradient_edge(output));
      values.push_back(at::ones_like(output));
    }
    split = std::make_unique<SplitBackward>(roots, values, node);
    for (at::Tensor& tensor : received) tensor.reset();
  }
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

void check_halves(const std::string& name, const Graph& graph) {
  CAPTURE(name);
  const Gradients whole = in_one_piece(graph);
  Halves halves(graph);
  const Tensors found = halves.split->input_half();
  for (size_t i = 0; i < 2; ++i) CHECK(same(found[i], whole.inputs[i]));
  for (const at::Tensor& weight : halves.held) CHECK(!weight.grad().defined());
  halves.split->weight_half();
  for (size_t i = 0; i < 3; ++i) CHECK(same(halves.held[i].grad(), whole.weights[i]));
}

struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * x * w;
  }
  static Tensors backward(AutogradContext* context, Tensors gradients) {
    const auto saved = context->get_saved_variables();
    at::Tensor of_x, of_w;
    if (context->needs_input_grad(0)) of_x = gradients[0] * 2 * saved[0] * saved[1];
    if (context->needs_input_grad(1)) of_w = gradients[0] * saved[0] * saved[0];
    return {of_x, of_w};
  }
};

TEST_CASE("two halves have the bits of one backward") {
  check_halves("a layer", [](const Tensors& x, const Tensors& w) {
    return Tensors{at::tanh(at::mm(x[0], w[0])) + x[1]};
  });
  check_halves("a weight used twice", [](const Tensors& x, const Tensors& w) {
    const at::Tensor hidden = at::mm(at::tanh(at::mm(x[0], w[0])), w[0]);
    return Tensors{hidden * w[1] + at::mm(x[1], w[0])};
  });
  check_halves("weights to which no input leads", [](const Tensors& x, const Tensors& w) {
    return Tensors{at::tanh(at::mm(w[0], w[1])).square() * x[0] + w[2].exp()};
  });
  check_halves(
      "an output of weights only, one of inputs only",
      [](const Tensors& x, const Tensors& w) { return Tensors{w[0].sin(), x[0].sin(), x[1]}; });
  check_halves(
      "several outputs, one of them no part of the graph", [](const Tensors& x, const Tensors& w) {
        const at::Tensor hidden = at::mm(x[0], w[0]);
        return Tensors{hidden, hidden.detach(), hidden.view({2, 8}), hidden, hidden * w[1]};
      });
  check_halves("nodes with several outputs", [](const Tensors& x, const Tensors& w) {
    const Tensors parts = at::mm(x[0], w[0]).split(2);
    const Tensors of_weight = w[1].unbind(0);
    return Tensors{parts[0] * of_weight[0] + parts[1] * of_weight[3]};
  });
  check_halves("work in place", [](const Tensors& x, const Tensors& w) {
    at::Tensor hidden = x[0];
    hidden.mul_(2).add_(at::mm(x[1], w[0]));
    return Tensors{hidden.relu_() * w[1]};
  });
  check_halves("a function of the user's", [](const Tensors& x, const Tensors& w) {
    return Tensors{Cube::apply(Cube::apply(x[0], w[0]) + x[1], w[1])};
  });
  check_halves("a checkpoint", [](const Tensors& x, const Tensors& w) {
    return Tensors{
        checkpoint([](const at::Tensor& value, const at::Tensor& one,
                      const at::Tensor& two) { return at::mm(at::tanh(at::mm(value, one)), two); },
                   x[0], w[0], w[1])};
  });
  check_halves("weights behind the last input", [](const Tensors& x, const Tensors& w) {
    return Tensors{(x[0] * x[1]).detach() * w[0]};
  });
}

TEST_CASE("without inputs that need gradients all is in the second half") {
  const Graph graph = [](const Tensors& x, const Tensors& w) {
    return Tensors{at::tanh(at::mm(x[0], w[0])) * w[1]};
  };
  const Gradients whole = in_one_piece(graph);
  Halves halves(graph, {false, false});
  CHECK(halves.split->input_half().empty());
  CHECK(!halves.held[0].grad().defined());
  halves.split->weight_half();
  for (size_t i = 0; i < 3; ++i) CHECK(same(halves.held[i].grad(), whole.weights[i]));
}

TEST_CASE("hooks are called once, and those of weights in the second half") {
  int64_t of_tensor = 0;
  int64_t of_weight = 0;
  Halves halves([&](const Tensors& x, const Tensors& w) {
    w[0].register_hook([&](const at::Tensor& gradient) {
      ++of_weight;
      return gradient * 3;
    });
    const at::Tensor hidden = at::mm(x[0], w[0]);
    hidden.register_hook([&](const at::Tensor& gradient) {
      ++of_tensor;
      return gradient * 2;
    });
    return Tensors{hidden};
  });
  const Tensors found = halves.split->input_half();
  CHECK(of_tensor == 1);
  CHECK(of_weight == 0);
  halves.split->weight_half();
  CHECK(of_tensor == 1);
  CHECK(of_weight == 1);
  const at::Tensor ones = at::ones({kSize, kSize}, at::kDouble);
  CHECK(found[0].equal(at::mm(ones * 2, numbers(3).t())));
  CHECK(halves.held[0].grad().equal(at::mm(numbers(1).t(), ones * 2) * 3));
}

TEST_CASE("what only inputs need is gone after the first half") {
  c10::weak_intrusive_ptr<c10::StorageImpl> activation(c10::intrusive_ptr<c10::StorageImpl>{});
  c10::weak_intrusive_ptr<c10::StorageImpl> input(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto watch = [](const at::Tensor& tensor) {
    return c10::weak_intrusive_ptr<c10::StorageImpl>(
        c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
            tensor.storage().unsafeGetStorageImpl()));
  };
  Halves halves([&](const Tensors& x, const Tensors& w) {
    input = watch(x[0]);
    const at::Tensor hidden = at::tanh(at::mm(x[0], w[0]));
    activation = watch(hidden);
    return Tensors{hidden * 2 + x[1]};
  });
  CHECK(!activation.expired());
  halves.split->input_half();
  CHECK(activation.expired());  // the result of tanh
  CHECK(!input.expired());      // the weight's gradient is made of it
  halves.split->weight_half();
  CHECK(input.expired());
}

TEST_CASE("an input that needs no gradient gets none") {
  const Graph graph = [](const Tensors& x, const Tensors& w) {
    return Tensors{at::mm(at::tanh(at::mm(x[0], w[0])), x[1])};
  };
  Halves halves(graph, {true, false});
  const Tensors found = halves.split->input_half();
  REQUIRE(found.size() == 2);
  CHECK(same(found[0], in_one_piece(graph).inputs[0]));
  CHECK(!found[1].defined());
}

TEST_CASE("an exception in a half comes out") {
  Halves halves([&](const Tensors& x, const Tensors& w) {
    w[0].register_hook([](const at::Tensor& gradient) -> at::Tensor {
      if (gradient.defined()) throw std::runtime_error("no such file");
      return gradient;
    });
    return Tensors{at::mm(x[0], w[0])};
  });
  halves.split->input_half();
  CHECK_THROWS_WITH(halves.split->weight_half(), Catch::Contains("no such file"));
}

}  // namespace trireme::split_backward_test

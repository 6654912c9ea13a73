// Transport tests: what one backward sends, in which order, and what it leaves in .grad. One rank
// runs; the recorded group plays a peer that holds the same gradients, so the average is this
// rank's own gradient.

#include <trireme/grad/grad_reducer.h>

#include <trireme/grad/whole_delivery.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <catch_torch.h>
#include <recording_communicator.h>

namespace trireme::grad_reducer_test {

using trireme::test::RecordingCommunicator;
using trireme::test::WireRecord;

namespace {

// A chain y = x * a * b * c * d ...: gradients arrive last letter first. Each parameter has four
// floats.
struct Chain {
  explicit Chain(std::string letters, GradReducerOptions options = {}, bool as_bucket_view = false)
      : names(std::move(letters)) {
    NamedParameters parameters;
    for (const char name : names) {
      weights.push_back(at::full({4}, 2.0F).set_requires_grad(true));
      parameters.names.emplace_back(1, name);
      parameters.tensors.push_back(weights.back());
      parameters.sparse_gradient.push_back(false);
    }
    if (options.caps.bytes == GradReducerOptions().caps.bytes)
      options.caps = {{16}};  // one parameter per bucket
    GradReducerParts parts{transport, trigger,
                           std::make_shared<WholeDelivery>(trigger, as_bucket_view)};
    reducer = GradReducer::make(parameters, std::move(parts), options);
  }

  // Uses the parameters whose letters are given, in that order.
  at::Tensor forward(const std::string& used, bool synchronize = true) {
    trigger->before_forward();
    at::Tensor y = at::ones({4});
    for (const char name : used) y = y * weights[names.find(name)];
    trigger->after_forward({y}, synchronize);
    return y;
  }
  void step(const std::string& used, bool synchronize = true) {
    backward(forward(used, synchronize).sum());
  }
  static void backward(const at::Tensor& loss) { torch::autograd::backward({loss}, {}); }
  void zero_grad() {
    for (const at::Tensor& weight : weights) weight.mutable_grad().reset();
  }
  at::Tensor grad(char name) const { return weights[names.find(name)].grad(); }

  // "d c b a" for four all-reduces of one gradient each.
  std::string sent() const {
    std::string text;
    for (const WireRecord& record : transport->records()) {
      if (record.verb != "all_reduce") continue;
      const size_t colon = record.label.find(": ");
      text += (text.empty() ? "" : " ") +
              (colon == std::string::npos ? record.label : record.label.substr(colon + 2));
    }
    return text;
  }

  std::string names;
  std::vector<at::Tensor> weights;
  std::shared_ptr<RecordingCommunicator> transport =
      std::make_shared<RecordingCommunicator>(RankOf{0, 2});
  std::shared_ptr<BackwardTrigger> trigger = std::make_shared<BackwardTrigger>();
  std::shared_ptr<GradReducer> reducer;
};

}  // namespace

TEST_CASE("one step sends every bucket once, the used-map behind the last gradients") {
  Chain chain("abcd");
  chain.step("abcd");
  CHECK(chain.sent() == "d c b a");
  const std::vector<WireRecord>& records = chain.transport->records();
  REQUIRE(records.size() == 5);
  CHECK(records[0].bytes == 16);
  CHECK(records[3].bytes == 16 + 5 * 4);  // four counts and the flag of a changed plan
  CHECK(records[3].dtypes == std::vector<std::string>{"Float"});
  CHECK(records[4].verb == "broadcast");  // the order that the first backward taught; never again
  chain.zero_grad();
  chain.transport->clear();
  chain.step("abcd");
  CHECK(chain.transport->records().size() == 4);
}

TEST_CASE("gradients are the average and final when backward returns") {
  Chain chain("abc");
  chain.step("abc");
  for (const char name : chain.names) CHECK(at::equal(chain.grad(name), at::full({4}, 4.0F)));
}

TEST_CASE("buckets follow the order in which gradients arrived in the first backward") {
  Chain chain("abcd");
  chain.step("dbca");  // gradients arrive a c b d
  CHECK(chain.sent() == "d c b a");
  chain.zero_grad();
  chain.transport->clear();
  chain.step("dbca");
  CHECK(chain.sent() == "a c b d");
}

TEST_CASE("an unused head holds back nobody") {
  Chain chain("abch");
  chain.step("abc");
  chain.zero_grad();
  chain.transport->clear();
  std::vector<std::string> sent_before_end;
  at::Tensor y = chain.forward("abc");
  // The gradient of a is the last thing that this backward computes; what is sent by then was
  // overlapped.
  chain.weights[0].register_hook(
      [&](const at::Tensor&) { sent_before_end.push_back(chain.sent()); });
  Chain::backward(y.sum());
  REQUIRE(sent_before_end.size() == 1);
  CHECK(sent_before_end[0] == "c b");
  CHECK(chain.sent() == "c b a h");
  CHECK_FALSE(chain.grad('h').defined());
}

TEST_CASE("a parameter that nobody used keeps its .grad to the last bit") {
  Chain chain("ab");
  chain.step("ab");
  const at::Tensor kept = chain.grad('b');
  kept.fill_(1.0F / 3.0F);
  chain.weights[0].mutable_grad().reset();
  chain.step("a");
  CHECK(chain.grad('b').is_same(kept));
  CHECK(at::equal(kept, at::full({4}, 1.0F / 3.0F)));
}

TEST_CASE("no_sync sends nothing and the next step averages what has come together") {
  Chain chain("ab");
  chain.step("ab", /*synchronize=*/false);
  CHECK(chain.transport->records().empty());
  const at::Tensor accumulated = chain.grad('a');
  chain.step("ab");
  CHECK(chain.sent() == "b a");
  CHECK(chain.grad('a').is_same(accumulated));
  CHECK(at::equal(chain.grad('a'), at::full({4}, 4.0F)));
}

TEST_CASE("a gradient kept by the user is never overwritten") {
  Chain chain("ab");
  chain.step("ab");
  const at::Tensor kept = chain.grad('a');
  const at::Tensor copy = kept.clone();
  for (int i = 0; i < 3; ++i) {
    chain.zero_grad();
    at::Tensor y = chain.forward("ab") * 5;
    Chain::backward(y.sum());
    CHECK(at::equal(chain.grad('a'), at::full({4}, 10.0F)));
  }
  CHECK(at::equal(kept, copy));
}

TEST_CASE("a .grad that was dropped comes back as the same tensor, unless somebody holds it") {
  Chain chain("ab");
  chain.step("ab");
  chain.zero_grad();
  chain.step("ab");                                       // in the buckets that were learned
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;  // no other tensor gets its address
  const Weak a(chain.grad('a').getIntrusivePtr());
  const Weak b(chain.grad('b').getIntrusivePtr());
  chain.zero_grad();
  chain.step("ab");
  CHECK(a.lock() == chain.grad('a').getIntrusivePtr());
  CHECK(b.lock() == chain.grad('b').getIntrusivePtr());
  const at::Tensor held = chain.grad('a');
  chain.zero_grad();
  chain.step("ab");
  CHECK_FALSE(chain.grad('a').is_same(held));
}

TEST_CASE("a .grad that was changed before it was dropped does not come back") {
  const std::vector<std::function<void(at::Tensor&)>> changes = {
      [](at::Tensor& grad) { grad.requires_grad_(); },
      [](at::Tensor& grad) { grad.unsqueeze_(0); },
      [](at::Tensor& grad) { grad.resize_({2}); },
      [](at::Tensor& grad) { grad.set_(at::ones({4})); },
      [](at::Tensor& grad) { grad.set_data(at::ones({4})); },
  };
  for (const auto& change : changes) {
    Chain chain("ab");
    chain.step("ab");
    chain.zero_grad();
    chain.step("ab");
    change(chain.weights[0].mutable_grad());
    chain.zero_grad();
    chain.step("ab");
    const at::Tensor grad = chain.grad('a');
    CHECK(at::equal(grad, at::full({4}, 2.0F)));
    CHECK_FALSE(grad.requires_grad());
    CHECK(grad.is_leaf());
  }
}

TEST_CASE("set_to_none=False: gradients stay where they are and nothing is allocated") {
  Chain chain("ab");
  chain.step("ab");
  chain.zero_grad();
  chain.step("ab");
  const at::Tensor grad = chain.grad('a');
  const void* memory = grad.const_data_ptr();
  grad.zero_();
  chain.grad('b').zero_();
  chain.step("ab");
  CHECK(chain.grad('a').is_same(grad));
  CHECK(grad.const_data_ptr() == memory);
  CHECK(at::equal(grad, at::full({4}, 2.0F)));
}

TEST_CASE(
    "a .grad of the user's own keeps its identity, or is replaced by a range as bucket view") {
  for (const bool as_view : {false, true}) {
    Chain chain("ab", {}, as_view);
    const at::Tensor own = at::zeros({4});
    chain.weights[0].mutable_grad() = own;
    chain.step("ab");
    CHECK(chain.grad('a').is_same(own) == !as_view);
    CHECK(at::equal(chain.grad('a'), at::full({4}, 2.0F)));
  }
}

TEST_CASE("ranges of a bucket are no views for autograd") {
  GradReducerOptions options;
  options.caps = {{1024}};
  Chain chain("ab", options);
  chain.step("ab");
  CHECK(chain.grad('a').is_alias_of(chain.grad('b')));
  CHECK_FALSE(chain.grad('a').is_view());
  CHECK_NOTHROW(chain.grad('a').detach_());
}

TEST_CASE("reduce_dtype changes the transport and not .grad") {
  GradReducerOptions options;
  options.reduce_dtype = at::kBFloat16;
  Chain chain("ab", options);
  chain.step("ab");
  CHECK(chain.transport->records()[0].dtypes == std::vector<std::string>{"BFloat16"});
  CHECK(chain.transport->records()[0].bytes ==
        16);                                 // both gradients: half the bytes under the same cap
  CHECK(chain.sent() == "b .. a used-map");  // bfloat16 cannot count ranks
  CHECK(chain.grad('a').scalar_type() == at::kFloat);
  CHECK(at::equal(chain.grad('a'), at::full({4}, 2.0F)));
}

TEST_CASE("grad_dtype changes the transport and .grad, from the backward on that follows") {
  Chain chain("ab");
  chain.step("ab");
  chain.zero_grad();
  chain.weights[0].set_grad_dtype(at::kDouble);
  for (int step = 0; step < 2; ++step) {
    chain.transport->clear();
    chain.step("ab");
    CHECK(chain.grad('a').scalar_type() == at::kDouble);
    CHECK(at::equal(chain.grad('a'), at::full({4}, 2.0, at::kDouble)));
    CHECK(chain.grad('b').scalar_type() == at::kFloat);
    chain.zero_grad();
  }
  CHECK(chain.transport->records()[1].dtypes == std::vector<std::string>{"Double"});
}

TEST_CASE("two forwards, one backward: one synchronization") {
  Chain chain("ab");
  const at::Tensor first = chain.forward("ab");
  const at::Tensor second = chain.forward("ab");
  Chain::backward((first + second).sum());
  CHECK(chain.sent() == "b a");
  CHECK(at::equal(chain.grad('a'), at::full({4}, 4.0F)));
}

TEST_CASE("two forwards, two backwards in the same order: each synchronizes its own") {
  Chain chain("ab");
  const at::Tensor first = chain.forward("ab");
  const at::Tensor second = chain.forward("ab");
  Chain::backward(first.sum());
  CHECK(chain.sent() == "b a");
  Chain::backward(second.sum());
  CHECK(chain.sent() == "b a b a");
  CHECK(at::equal(chain.grad('a'), at::full({4}, 4.0F)));
}

TEST_CASE("autograd::grad and backward(inputs=) of others arm nothing; of ours they do") {
  Chain chain("ab");
  const at::Tensor input = at::ones({4}).set_requires_grad(true);
  chain.trigger->before_forward();
  const at::Tensor y = input * chain.weights[0] * chain.weights[1];
  chain.trigger->after_forward({y}, true);
  torch::autograd::grad({y.sum()}, {input}, {}, /*retain_graph=*/true);
  torch::autograd::grad({y.sum()}, {chain.weights[0]}, {}, /*retain_graph=*/true);
  torch::autograd::backward({y.sum()}, {}, /*retain_graph=*/true, false, {input});
  CHECK(chain.transport->records().empty());
  torch::autograd::backward({y.sum()}, {}, false, false, {chain.weights[0]});
  CHECK(chain.sent() == "b a");
}

TEST_CASE("prepare_for_backward synchronizes a no_sync forward") {
  Chain chain("ab");
  const at::Tensor y = chain.forward("ab", /*synchronize=*/false);
  chain.trigger->prepare_for_backward();
  Chain::backward(y.sum());
  CHECK(chain.sent() == "b a");
}

TEST_CASE("without output tensors the first gradient arms") {
  Chain chain("ab");
  chain.trigger->before_forward();
  const at::Tensor y = chain.weights[0] * chain.weights[1];
  chain.trigger->after_forward({}, true);
  Chain::backward(y.sum());
  CHECK(chain.sent() == "b a");
  CHECK(at::equal(chain.grad('a'), at::full({4}, 2.0F)));
}

TEST_CASE("freezing and unfreezing: announced in one step, planned in the next") {
  Chain chain("abc");
  chain.step("abc");
  chain.zero_grad();
  chain.weights[2].set_requires_grad(false);
  chain.transport->clear();
  chain.step("abc");
  CHECK(chain.sent() == "c b a");  // c still has its place and carries zeros
  CHECK_FALSE(chain.grad('c').defined());
  CHECK(chain.transport->records().back().verb == "all_gather");
  chain.zero_grad();
  chain.transport->clear();
  chain.step("abc");
  CHECK(chain.sent() == "b a");
  chain.zero_grad();
  chain.weights[2].set_requires_grad(true);
  chain.transport->clear();
  chain.step("abc");
  CHECK(chain.sent() == "b a c");  // reduced at the end of the very backward that brought it
  CHECK(at::equal(chain.grad('c'), at::full({4}, 4.0F)));
  chain.zero_grad();
  chain.transport->clear();
  chain.step("abc");
  CHECK(chain.sent() == "b a c");
  CHECK(chain.transport->records().size() == 3);
}

TEST_CASE("manual finalization leaves the wait to the caller") {
  Chain chain("ab");
  chain.reducer->set_manual_finalization(true);
  chain.step("ab");
  CHECK(chain.sent() == "b a");
  CHECK_FALSE(chain.grad('a').defined());
  CHECK_THROWS_WITH(chain.forward("ab"), Catch::Contains("finalize_backward()"));
  chain.reducer->finalize_backward();
  CHECK(at::equal(chain.grad('a'), at::full({4}, 2.0F)));
  CHECK_THROWS_WITH(chain.reducer->finalize_backward(),
                    Catch::Contains("no synchronized backward"));
}

TEST_CASE("an exception in the middle of backward is announced with the last gradient") {
  Chain chain("abc");
  chain.step("abc");
  chain.zero_grad();
  at::Tensor y = chain.forward("abc");
  chain.weights[1].register_hook(
      [](const at::Tensor&) { TORCH_CHECK(false, "the user's own error"); });
  CHECK_THROWS_WITH(Chain::backward(y.sum()), Catch::Contains("the user's own error"));
  REQUIRE(chain.transport->failure());
  CHECK_THAT(*chain.transport->failure(),
             Catch::Contains("backward 2 was abandoned after the gradient of 'c' (rank 0 of 2)"));
  CHECK_THROWS_WITH(chain.forward("abc"), Catch::Contains("wrap the module anew"));
}

TEST_CASE("the graph of an average goes on into this rank's gradients") {
  for (const bool as_bucket_view : {false, true}) {
    CAPTURE(as_bucket_view);
    Chain chain("ab", {}, as_bucket_view);
    const auto backward = [&] {
      torch::autograd::backward({chain.forward("ab").sum()}, {}, true, /*create_graph=*/true);
    };
    backward();
    chain.zero_grad();
    backward();
    const at::Tensor kept = chain.grad('a');
    CHECK(at::equal(kept.detach(), at::full({4}, 2.0F)));  // y = a * b: d(y) / d(a) = b
    const auto slope = [&] {
      return torch::autograd::grad({chain.grad('a').sum()}, {chain.weights[1]}, {}, true)[0];
    };
    CHECK(at::equal(slope(), at::full({4}, 0.5F)));  // two ranks average it
    backward();
    CHECK(at::equal(chain.grad('a').detach(), at::full({4}, 4.0F)));
    CHECK(at::equal(slope(), at::full({4}, 0.75F)));  // what is averaged twice is halved twice
    CHECK(at::equal(kept.detach(), at::full({4}, 2.0F)));
    chain.step("ab");
    CHECK(at::equal(slope(), at::full({4}, 0.75F)));  // this one made no graph
    chain.zero_grad();
    chain.transport->clear();
    Chain::backward(kept.square().sum());  // reaches no output, but an average: d / d(b)
    CHECK(chain.sent() == "b a");
    CHECK(at::equal(chain.grad('b'), at::full({4}, 2.0F)));
  }
}

TEST_CASE("a gradient with a graph that waited for an average gets its part of it") {
  Chain chain("ab");
  const auto backward = [&](const char* used, bool synchronize) {
    torch::autograd::backward({chain.forward(used, synchronize).sum()}, {}, true, true);
  };
  backward("ab", false);
  backward("b", true);
  CHECK(at::equal(chain.grad('a').detach(), at::full({4}, 2.0F)));
  const auto slope = torch::autograd::grad({chain.grad('a').sum()}, {chain.weights[1]})[0];
  CHECK(at::equal(slope, at::full({4}, 0.5F)));
}

TEST_CASE("an abandoned backward leaves the graphs of gradients that stay") {
  Chain chain("ab");
  const auto backward = [&](bool synchronize) {
    torch::autograd::backward({chain.forward("ab", synchronize).sum()}, {}, true, true);
  };
  backward(false);
  const auto hook = chain.weights[0].register_hook(
      [](const at::Tensor&) { TORCH_CHECK(false, "the user's own error"); });
  CHECK_THROWS_WITH(backward(true), Catch::Contains("the user's own error"));
  chain.weights[0].remove_hook(hook);
  for (const char name : {'a', 'b'}) {  // b's gradient came twice
    const at::Tensor& other = chain.weights[name == 'a' ? 1 : 0];
    const float times = name == 'a' ? 1 : 2;
    const auto slope = torch::autograd::grad({chain.grad(name).sum()}, {other}, {}, true)[0];
    CHECK(at::equal(slope, at::full({4}, times)));
  }
}

TEST_CASE("a join takes part with zeros and leaves .grad alone") {
  Chain chain("ab");
  chain.step("ab");
  const at::Tensor grad = chain.grad('a');
  const at::Tensor copy = grad.clone();
  chain.transport->clear();
  chain.reducer->shadow_backward();
  CHECK(chain.sent() == "b a");
  CHECK(chain.grad('a').is_same(grad));
  CHECK(at::equal(grad, copy));
}

}  // namespace trireme::grad_reducer_test

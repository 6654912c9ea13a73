// What autograd saves goes to files, comes back as it was, and leaves nothing behind.

#include <trireme/activation/offload.h>

#include <trireme/activation/checkpoint.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>

#include <activation/folder_in_use.h>
#include <algorithm>
#include <atomic>
#include <catch_torch.h>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <sys/resource.h>
#include <temporary_folder.h>
#include <thread>
#include <utility>
#include <vector>

namespace trireme::offload_test {

using namespace trireme::test;
using Catch::Contains;
using torch::Tensor;
using torch::autograd::grad;

namespace {

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 256;  // with them 64 KiB of float, the least that is offloaded

Tensor values() { return torch::randn({kRows, kColumns}); }
Tensor leaf() { return values().requires_grad_(); }

CheckpointOptions offload_to(const std::string& folder) {
  CheckpointOptions options;
  options.offload = ActivationOffload{folder};
  return options;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto bytes = [](const Tensor& of) {
    return of.detach().resolve_conj().resolve_neg().contiguous().flatten().view(at::kByte);
  };
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() && torch::equal(bytes(a), bytes(b));
}

bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return same_bits(x, y); });
}

// A block that saves views with gaps, transposed ones, masks and what is changed in place before.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kColumns})));
    wide = register_module("wide", torch::nn::Linear(kColumns, 3 * kColumns));
    dropout = register_module("dropout", torch::nn::Dropout(0.5));
  }
  Tensor forward(const Tensor& x) {
    ++calls;
    const auto parts = wide(norm(x)).chunk(3, -1);
    const Tensor weights = torch::softmax(parts[0].matmul(parts[1].t()), -1);
    return x + dropout(weights.matmul(parts[2])).relu_();
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear wide{nullptr};
  torch::nn::Dropout dropout{nullptr};
  std::atomic<int> calls{0};
};
TORCH_MODULE(Block);

// Trains a step from the same seed; returns the loss, all gradients and the next random number.
std::vector<Tensor> train(torch::nn::Module& module, Tensor x, const std::function<Tensor()>& run) {
  torch::manual_seed(7);
  module.zero_grad();
  x.mutable_grad() = Tensor();
  const Tensor loss = run().square().sum();
  loss.backward();
  std::vector<Tensor> found{loss.detach(), x.grad().clone()};
  for (const Tensor& parameter : module.parameters()) found.push_back(parameter.grad().clone());
  found.push_back(torch::rand({}));
  return found;
}

}  // namespace

TEST_CASE("a net is trained to the bits of a plain one, and its blocks run once") {
  const TemporaryFolder folder;
  torch::nn::Sequential net{Block(), Block(), Block()};
  const Tensor x = leaf();
  const auto plain = train(*net, x, [&] { return net->forward(x); });
  for (const std::string& place : {std::string(), folder.path}) {
    CAPTURE(place);
    const CheckpointOptions options = offload_to(place);
    const auto run = [&] {
      Tensor value = x;
      for (int64_t i = 0; i < 3; ++i) {
        value = checkpoint(
            options, [&](const Tensor& v) { return net->ptr<BlockImpl>(i)->forward(v); }, value);
      }
      CHECK((offloaded_bytes().now > 0) == !place.empty());
      CHECK(is_in_use(folder.path) == !place.empty());
      CHECK(std::filesystem::is_empty(folder.path));
      return value;
    };
    const int calls = net->ptr<BlockImpl>(0)->calls;
    CHECK(same_bits(train(*net, x, run), plain));
    CHECK(net->ptr<BlockImpl>(0)->calls.load() == calls + 1);
    CHECK(offloaded_bytes().now == 0);
    CHECK_FALSE(is_in_use(folder.path));
  }
}

TEST_CASE("tensors of all kinds come back as they were") {
  const TemporaryFolder folder;
  const auto packer = make_offload_packer({folder.path});
  const auto check = [&](const Tensor& tensor, bool is_offloaded) {
    CAPTURE(tensor.dtype(), tensor.sizes(), tensor.strides());
    const int64_t before = offloaded_bytes().now;
    const auto packed = packer->pack(tensor);
    CHECK((offloaded_bytes().now > before) == is_offloaded);
    for (int time = 0; time < 2; ++time) {
      const Tensor found = packed->unpack();
      CHECK(found.strides() == tensor.strides());
      CHECK(found.is_conj() == tensor.is_conj());
      CHECK(found.is_neg() == tensor.is_neg());
      CHECK_FALSE(found.requires_grad());
      CHECK(found.is_alias_of(tensor) != is_offloaded);
      CHECK(same_bits(found, tensor));
    }
  };
  // What outlives its graph is kept the next time.
  const auto large = [] { return torch::randn({256, 512}).abs().mul(10); };
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort,
        at::kInt, at::kLong, at::kBool, at::kComplexHalf, at::kComplexFloat, at::kComplexDouble,
        at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    check(large().to(dtype), true);
  }
  check(large().t(), true);
  check(large().narrow(1, 3, 300), true);                     // with gaps
  check(large().slice(0, 1, 200, 3).slice(1, 5), true);       // with more of them
  check(large().narrow(0, 7, 200).view(at::kShort), true);    // it has another dtype
  check(large().as_strided({500, 400}, {100, 1}, 13), true);  // overlapping itself
  check(large().unsqueeze(1).expand({256, 3, 512}), true);
  check(large().select(0, 3).expand({512, 512}), false);  // 2 KiB in fact
  check(torch::randn({4, 16, 32, 32}).contiguous(at::MemoryFormat::ChannelsLast), true);
  const auto numbers = [] { return torch::randn({256, 128}, at::kComplexFloat); };
  check(numbers().conj(), true);
  check(torch::imag(numbers().conj()), true);
  check(large()._neg_view(), true);
  check(torch::tensor(3.0), false);
  check(torch::empty({0, 512}), false);
  check(torch::randn({2, 3}), false);
  check(torch::randn({20000, 128}).narrow(1, 3, 1), false);  // a column: its storage stays
}

TEST_CASE("operators that write what they have saved: bits of a plain call, also recomputed") {
  const TemporaryFolder folder;
  CheckpointOptions late;
  late.early_stop = false;
  const std::vector<std::function<Tensor(const Tensor&)>> functions = {
      [](const Tensor& x) { return at::rrelu(x, 0.1, 0.9, /*training=*/true); },
      [](const Tensor& x) { return at::rrelu(x.exp(), 0.1, 0.9, /*training=*/true); },
      [](const Tensor& x) { return at::rrelu(x, 0.1, 0.9, /*training=*/true).exp().sin(); },
      [](const Tensor& x) {
        Tensor twice = x.mul(2);
        return at::rrelu_(twice, 0.1, 0.9, /*training=*/true);
      }};
  for (const auto& function : functions) {
    const auto run = [&](const std::function<Tensor(const Tensor&)>& call) {
      torch::manual_seed(7);
      const Tensor x = leaf(), result = call(x);
      return std::vector<Tensor>{result, grad({result.square().sum()}, {x}).front(),
                                 torch::rand({})};
    };
    const auto plain = run(function);
    for (const CheckpointOptions& options : {CheckpointOptions{}, late, offload_to(folder.path)}) {
      CAPTURE(&function - functions.data(), options.early_stop, options.offload.has_value());
      CHECK(same_bits(
          run([&](const Tensor& x) { return trireme::checkpoint(options, function, x); }), plain));
    }
  }
}

TEST_CASE("what is more than a plain tensor is kept") {
  const TemporaryFolder folder;
  const auto packer = make_offload_packer({folder.path});
  const Tensor large = torch::randn({256, 512});
  for (const Tensor& tensor :
       {large.to_sparse(), at::quantize_per_tensor(large, 0.1, 10, at::kQInt8),
        at::_efficientzerotensor({256, 512}, large.options()), torch::empty({256, 512}, at::kMeta),
        at::_nested_tensor_from_tensor_list({large, large})}) {
    const auto packed = packer->pack(tensor);
    CHECK(packed->unpack().is_same(tensor));
    CHECK(offloaded_bytes().now == 0);
  }
  const Tensor weight = torch::randn({256, 256}).requires_grad_();
  for (const Tensor& tensor : {weight, weight.t(), weight.view({-1}), weight.narrow(0, 1, 100)}) {
    const auto packed = packer->pack(tensor);
    CHECK(packed->unpack().is_alias_of(weight));
    CHECK(packed->unpack().strides() == tensor.strides());
    CHECK_FALSE(packed->unpack().requires_grad());
  }
  CHECK(offloaded_bytes().now == 0);
}

TEST_CASE("memory is written once for all tensors that show it, and anew when it was changed") {
  const TemporaryFolder folder;
  const auto packer = make_offload_packer({folder.path});
  std::vector<c10::intrusive_ptr<PackedSavedTensor>> held;
  const auto written_for = [&](const Tensor& tensor) {
    const int64_t before = offloaded_bytes().written;
    held.push_back(packer->pack(tensor));
    CHECK(same_bits(held.back()->unpack(), tensor));
    return offloaded_bytes().written - before;
  };
  const Tensor x = torch::randn({256, 256});
  const auto bytes = static_cast<int64_t>(x.nbytes());
  CHECK(written_for(x) == bytes);
  for (const Tensor& view : {x, x.t(), x.view({-1, 64}), x.view(at::kInt), x.narrow(0, 10, 200),
                             x.unsqueeze(0).expand({3, 256, 256}), x.detach()}) {
    CHECK(written_for(view) == 0);
  }
  x.add_(1);
  CHECK(written_for(x) == bytes);
  CHECK_THAT(error_of([&] { held.front()->unpack(); }),
             Contains("modified by an inplace operation: float[256, 256] is at version 1"));

  const Tensor wide = torch::randn({64, 768});
  const auto parts = wide.chunk(3, 1);
  CHECK(written_for(parts[1]) == static_cast<int64_t>(wide.nbytes()));
  CHECK(written_for(parts[0]) + written_for(parts[2]) + written_for(wide) == 0);

  // An allocator gives the same address to one after the other.
  for (double i = 0; i < 50; ++i) CHECK(written_for(torch::full({128, 128}, i)) == 65536);
  for (int i = 0; i < 50; ++i) {
    CHECK(held[held.size() - 50 + static_cast<size_t>(i)]->unpack().eq(i).all().item<bool>());
  }
}

TEST_CASE("what outlived the graph that it was offloaded for is kept from then on") {
  const TemporaryFolder folder;
  const Tensor frozen = torch::randn({kColumns, kColumns});
  const Tensor x = leaf();
  const auto written_for = [&](const Tensor& weight) {
    const int64_t before = offloaded_bytes().written;
    const auto function = [&](const Tensor& v) { return v.matmul(weight.t()); };
    checkpoint(offload_to(folder.path), function, x).sum().backward();
    return offloaded_bytes().written - before;
  };
  CHECK(written_for(frozen) == static_cast<int64_t>(frozen.nbytes()));
  CHECK(written_for(frozen) == 0);
  CHECK(written_for(frozen.clone().requires_grad_()) == 0);  // a parameter is known at once
}

TEST_CASE("what is changed in place is noticed, wherever it lies") {
  const TemporaryFolder folder;
  for (const std::string& place : {std::string(), folder.path}) {
    const Tensor x = leaf();
    Tensor output = checkpoint(offload_to(place), [](const Tensor& v) { return v.exp(); }, x);
    output.add_(1);
    CHECK_THAT(error_of([&] { output.sum().backward(); }),
               Contains("[checkpoint] one of the variables needed for gradient computation has "
                        "been modified by an inplace operation"));
  }
}

TEST_CASE("several backwards and second derivatives go through, nested in checkpoints or around") {
  const TemporaryFolder folder;
  const CheckpointOptions to_file = offload_to(folder.path);
  const Tensor x = leaf();
  const auto function = [](const Tensor& v) { return v.sin().exp(); };
  const auto offloaded = [&](const Tensor& v) { return checkpoint(to_file, function, v); };
  const auto recomputed = [&](const Tensor& v) { return checkpoint(function, v); };
  const auto twice = [](const auto& pass) {
    return [pass](const Tensor& v) { return pass(pass(v)); };
  };
  const std::vector<
      std::pair<std::function<Tensor(const Tensor&)>, std::function<Tensor(const Tensor&)>>>
      cases{{offloaded, function},
            {[&](const Tensor& v) { return checkpoint(twice(offloaded), v); }, twice(function)},
            {[&](const Tensor& v) { return checkpoint(to_file, twice(offloaded), v); },
             twice(function)},
            {[&](const Tensor& v) { return checkpoint(to_file, twice(recomputed), v); },
             twice(function)}};
  for (const auto& [ours, plain] : cases) {
    const auto results = [&](const std::function<Tensor(const Tensor&)>& of) {
      const Tensor loss = of(x).sum();
      std::vector<Tensor> found = grad({loss}, {x}, {}, /*retain_graph=*/true);
      found.push_back(grad({loss}, {x})[0]);
      const Tensor first = grad({of(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      found.push_back(grad({first.square().sum()}, {x})[0]);
      return found;
    };
    CHECK(same_bits(results(ours), results(plain)));
    CHECK(offloaded_bytes().now == 0);
  }
  const auto with_backward = [&](const Tensor& v) {
    return v.cos() * grad({v.sin().exp().sum()}, {v}, {}, true)[0];
  };
  CHECK(same_bits(grad({checkpoint(to_file, with_backward, x).sum()}, {x}),
                  grad({with_backward(x).sum()}, {x})));
}

TEST_CASE("nothing is left of a graph that no backward used, or that an exception ended") {
  const TemporaryFolder folder;
  const CheckpointOptions options = offload_to(folder.path);
  const Tensor x = leaf();
  {
    const Tensor output = checkpoint(options, [](const Tensor& v) { return v.exp().exp(); }, x);
    CHECK(offloaded_bytes().now > 0);
  }
  CHECK_THROWS_AS(checkpoint(
                      options,
                      [](const Tensor& v) {
                        const Tensor result = v.exp().exp();
                        throw std::out_of_range("mine");
                        return result;
                      },
                      x),
                  std::out_of_range);
  CHECK(offloaded_bytes().now == 0);
  CHECK_FALSE(is_in_use(folder.path));
  const at::NoGradGuard no_grad;
  CHECK_FALSE(checkpoint(options, [](const Tensor& v) { return v.exp(); }, x).requires_grad());
}

namespace {

// Files of this process end here, as on a disk that is full.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : before_handler_(::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit smaller{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &smaller);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    ::signal(SIGXFSZ, before_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*before_handler_)(int);
};

}  // namespace

TEST_CASE("folders that cannot be written are refused, and the next step works") {
  const TemporaryFolder folder;
  const Tensor x = leaf();
  const auto function = [](const Tensor& v) { return v.exp().exp(); };
  const auto run = [&](const std::string& place) {
    return checkpoint(offload_to(place), function, x);
  };
  std::ofstream(folder.at("file")) << "text";
  for (const std::string& place : {folder.at("none"), folder.at("file")}) {
    CHECK_THAT(error_of<c10::ValueError>([&] { run(place); }),
               Contains("[checkpoint] got '" + place + "' to offload to, expected a folder"));
  }
  // Nobody may write there, root included.
  CHECK_THAT(error_of([&] { run("/proc"); }),
             Contains("[checkpoint] cannot offload 65536 bytes to a file in '/proc'"));
  {
    const FileSizeLimit limit(100000);  // room for the first tensor, and for a part of the second
    CHECK_THAT(error_of([&] { run(folder.path); }),
               Contains("[checkpoint] cannot offload 65536 bytes to a file in '" + folder.path) &&
                   Contains("bytes free: File too large") && Contains("Make room there"));
  }
  CHECK_FALSE(is_in_use(folder.path));
  CHECK(same_bits(grad({run(folder.path).sum()}, {x}), grad({function(x).sum()}, {x})));
}

TEST_CASE("threads offload at once, and share a graph") {
  const TemporaryFolder folder;
  torch::nn::Sequential net{Block(), Block()};
  net->eval();
  const Tensor x = leaf();
  const auto run = [&] {
    return checkpoint(
               offload_to(folder.path), [&](const Tensor& v) { return net->forward(v); }, x)
        .sum();
  };
  const auto plain = grad({net->forward(x).sum()}, {x});
  const Tensor shared = run();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&] {
      for (int round = 0; round < 10; ++round) {
        wrong += same_bits(grad({run()}, {x}), plain) ? 0 : 1;
        wrong += same_bits(grad({shared}, {x}, {}, /*retain_graph=*/true), plain) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}

namespace {

using Step = std::function<Tensor(const Tensor&)>;

// One of the many things that a layer does.
Step random_step(std::mt19937& random, const std::vector<Tensor>& weights) {
  const Tensor& weight = weights[random() % weights.size()];
  switch (random() % 12) {
    case 0:
      return [](const Tensor& v) { return v.tanh(); };
    case 1:
      return [weight](const Tensor& v) { return torch::linear(v, weight).tanh(); };
    case 2:
      return [](const Tensor& v) { return v * v.sigmoid(); };
    case 3:
      return [](const Tensor& v) { return torch::dropout(v, 0.3, true); };
    case 4:
      return [](const Tensor& v) { return v.exp().clamp_max(2) - 1; };
    case 5:
      return [](const Tensor& v) { return (v * 1.5).relu_() + v; };
    case 6:
      return [](const Tensor& v) {
        const auto parts = v.chunk(2, 1);
        return torch::cat({parts[1].sin(), parts[0] * parts[1].cos()}, 1);
      };
    case 7:
      return [](const Tensor& v) { return torch::layer_norm(v, {kColumns}); };
    case 8:
      return [](const Tensor& v) { return torch::softmax(v.matmul(v.t()), 1).matmul(v); };
    case 9:
      return [](const Tensor& v) { return v.t().contiguous().cos().t(); };
    case 10:
      return [](const Tensor& v) { return v + v.mean(0, true).expand_as(v) * v; };
    default:
      return [](const Tensor& v) {
        return v.reshape({kRows, 16, 16}).transpose(1, 2).reshape({kRows, kColumns}).pow(3).tanh();
      };
  }
}

}  // namespace

TEST_CASE("a hundred random nets with offload equal the plain ones bit for bit") {
  const TemporaryFolder folder;
  const std::vector<Tensor> weights{(torch::randn({kColumns, kColumns}) / 16).requires_grad_(),
                                    (torch::randn({kColumns, kColumns}) / 16).requires_grad_(),
                                    torch::randn({kColumns, kColumns}) / 16};  // frozen
  for (uint32_t seed = 0; seed < 100; ++seed) {
    CAPTURE(seed);
    const Tensor x = leaf();
    const auto run = [&](bool is_offloaded) {
      std::mt19937 random(seed);
      torch::manual_seed(seed);
      Tensor value = x.clone();
      const auto layers = 1 + random() % 4;
      for (size_t layer = 0; layer < layers; ++layer) {
        std::vector<Step> steps;
        for (auto count = 1 + random() % 4; count > 0; --count) {
          steps.push_back(random_step(random, weights));
        }
        const Step all = [steps](Tensor v) {
          for (const Step& step : steps) v = step(v);
          return v;
        };
        const auto kind = random() % 4;
        const CheckpointOptions options = offload_to(kind == 0 ? std::string() : folder.path);
        const Step inner = [&](const Tensor& v) { return checkpoint(options, all, v); };
        if (!is_offloaded || kind == 1) {
          value = all(value);
        } else if (kind == 2) {
          value = checkpoint(options, inner, value);
        } else {
          value = inner(value);
        }
      }
      std::vector<Tensor> found{value.detach()};
      const auto gradients = grad({value.square().mean()}, {x, weights[0], weights[1]}, {}, {},
                                  /*create_graph=*/false, /*allow_unused=*/true);
      for (const Tensor& gradient : gradients)
        found.push_back(gradient.defined() ? gradient : torch::zeros({}));
      return found;
    };
    CHECK(same_bits(run(true), run(false)));
  }
  CHECK(offloaded_bytes().now == 0);
}

}  // namespace trireme::offload_test

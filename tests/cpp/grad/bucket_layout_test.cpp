// A communication hook is shown these buckets, drawn as "index:letters": see [Note: buckets under a
// communication hook].

#include <trireme/grad/bucket_layout.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <string>

namespace trireme::bucket_layout_test {

namespace {

// A parameter per letter, of four floats; two share a bucket.
struct Letters {
  explicit Letters(const std::string& letters) { begin(letters); }

  // Keeps the tensors of the letters that were there before.
  void begin(const std::string& letters) {
    NamedParameters next;
    for (const char letter : letters) {
      const size_t before = parameters.names.size();
      size_t known = 0;
      while (known < before && parameters.names[known] != std::string(1, letter)) ++known;
      next.names.emplace_back(1, letter);
      next.tensors.push_back(known < before ? parameters.tensors[known]
                                            : at::zeros({4}).set_requires_grad(true));
      next.sparse_gradient.push_back(false);
    }
    parameters = next;
    layout.begin(parameters, /*step=*/0);
  }
  // Makes the plan of a step in which these letters train.
  std::string plan(const std::string& trained) {
    layout.set_order(indices(trained));
    layout.build({});
    NumberedPlan all{layout.plan(), {}};
    for (size_t b = 0; b < all.plan.buckets.size(); ++b) all.numbers.push_back(layout.number_of(b));
    return picture(all);
  }
  std::string beside(const std::string& letters) {
    return picture(layout.plan_beside(indices(letters)));
  }
  std::vector<int64_t> indices(const std::string& letters) const {
    std::vector<int64_t> found;
    for (const char letter : letters)
      for (size_t i = 0; i < parameters.names.size(); ++i)
        if (parameters.names[i] == std::string(1, letter)) found.push_back(static_cast<int64_t>(i));
    return found;
  }
  std::string picture(const NumberedPlan& of) const {
    std::string text;
    for (size_t b = 0; b < of.numbers.size(); ++b) {
      text += (b == 0 ? "" : " ") + std::to_string(of.numbers[b]) + ":";
      for (const BucketSlot& slot : of.plan.buckets[b].slots)
        text += parameters.names[static_cast<size_t>(slot.parameter)];
    }
    return text;
  }

  // Begins a step of all buckets; returns where their memory is.
  std::vector<const void*> begin_step() {
    const at::NoGradGuard no_grad;  // as a backward without a graph
    std::vector<const void*> memory;
    for (const auto& bucket : layout.buckets()) {
      bucket->begin_step(/*shadow=*/false);
      memory.push_back(bucket->transport().const_data_ptr());
    }
    return memory;
  }
  at::Tensor& grad(char letter) const {
    return parameters.tensors[static_cast<size_t>(indices({letter}).front())].mutable_grad();
  }

  NamedParameters parameters{{"a"}, {at::zeros({4}).set_requires_grad(true)}, {false}};
  BucketLayout layout{{{{32}}, {}, {}, {}, {}}, parameters};
};

}  // namespace

TEST_CASE("without a hook buckets are planned anew, and numbered by their places") {
  Letters letters("abcd");
  CHECK(letters.plan("dcba") == "0:dc 1:ba");
  CHECK(letters.beside("a") == "2:a");
  CHECK(letters.plan("cba") == "0:cb 1:a");
}

TEST_CASE("under a hook what comes in addition lies behind") {
  Letters letters("abcdef");
  letters.layout.keep_buckets();
  CHECK(letters.plan("badc") == "0:ba 1:dc");
  CHECK(letters.beside("fe") == "2:fe");
  CHECK(letters.plan("feabcd") == "0:ba 1:dc 2:fe");
}

TEST_CASE("under a hook a bucket is sent as long as one of its parameters trains") {
  Letters letters("abcd");
  letters.layout.keep_buckets();
  CHECK(letters.plan("abcd") == "0:ab 1:cd");
  CHECK(letters.plan("bcd") == "0:ab 1:cd");
  CHECK(letters.plan("cd") == "1:cd");
  CHECK(letters.beside("a") == "0:ab");
  CHECK(letters.plan("acd") == "0:ab 1:cd");
}

TEST_CASE("under a hook what is left of a bucket goes behind, under an index nobody had") {
  Letters letters("abcdef");
  letters.layout.keep_buckets();
  CHECK(letters.plan("abcdef") == "0:ab 1:cd 2:ef");
  letters.begin("abdeg");  // c and f are gone
  CHECK(letters.beside("g") == "3:g");
  CHECK(letters.plan("abdeg") == "0:ab 3:g 4:de");
  letters.layout.infos()[0].grad_dtype = at::kDouble;
  CHECK(letters.beside("a") == "5:a");
  CHECK(letters.plan("abdeg") == "3:g 4:de 5:a 6:b");
}

TEST_CASE("gradients that are left lie where they lay") {
  Letters letters("abcd");
  letters.plan("dcba");
  const std::vector<const void*> before = letters.begin_step();
  CHECK(letters.plan("dcb") == "0:dc 1:b");
  CHECK(letters.begin_step() == before);
  CHECK(letters.layout.buckets()[1]->transport().numel() == 4);
  CHECK(letters.plan("dc") == "0:dc");
  CHECK(letters.begin_step().front() == before.front());
}

TEST_CASE("memory in which somebody holds a gradient is left alone") {
  Letters letters("abcd");
  letters.plan("dcba");
  const std::vector<const void*> before = letters.begin_step();
  Bucket& last = *letters.layout.buckets()[1];
  for (const size_t slot : {0, 1}) {
    letters.grad("ba"[slot]) = at::ones({4});
    last.gradient_arrived(slot, /*scale=*/3);
  }
  last.complete(3);
  for (const size_t slot : {0, 1}) last.deliver(slot, /*as_bucket_view=*/false);
  // The program holds that of a layer that trains on, or a layer that does not train any more holds
  // its own.
  const char holder = GENERATE('b', 'a');
  const at::Tensor held = letters.grad(holder);
  letters.grad('b').reset();
  if (holder == 'b') letters.grad('a').reset();
  letters.plan("dcb");
  const std::vector<const void*> now = letters.begin_step();
  CHECK(now[0] == before[0]);
  CHECK(now[1] != before[1]);
  CHECK(at::equal(held, at::full({4}, 3.0F)));
}

TEST_CASE("a gradient that lies in a bucket stays in its place") {
  Letters letters("abcd");
  letters.plan("dcba");
  letters.begin_step();
  Bucket& last = *letters.layout.buckets()[1];
  letters.grad('b') = at::ones({4});
  last.gradient_arrived(0, /*scale=*/1);
  last.complete(1);
  last.deliver(0, /*as_bucket_view=*/false);
  const at::Tensor grad = letters.grad('b');
  const void* place = grad.const_data_ptr();
  letters.plan("dcb");
  CHECK(letters.begin_step()[1] == place);
  CHECK(letters.grad('b').is_same(grad));
  CHECK(at::equal(grad, at::ones({4})));
}

}  // namespace trireme::bucket_layout_test

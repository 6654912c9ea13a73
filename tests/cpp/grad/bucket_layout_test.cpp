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

}  // namespace trireme::bucket_layout_test

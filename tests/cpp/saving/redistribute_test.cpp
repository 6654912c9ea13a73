// Parts of tensors go from ranks that hold them to ranks that need them, on threads as ranks.

#include <trireme/saving/redistribute.h>

#include <trireme/saving/checkpoint_reader.h>

#include <catch_torch.h>
#include <mutex>
#include <string>
#include <temporary_folder.h>
#include <thread_ranks.h>
#include <vector>

namespace trireme::redistribute_test {

using namespace trireme::test;

namespace {

const std::vector<at::ScalarType> kDtypes = {
    at::kFloat,         at::kBFloat16,     at::kDouble, at::kBool,          at::kLong, at::kByte,
    at::kComplexDouble, at::kComplexFloat, at::kHalf,   at::kFloat8_e4m3fn, at::kShort};

at::Tensor whole_of(at::ScalarType dtype, at::IntArrayRef sizes, int64_t seed) {
  const int64_t numel = c10::multiply_integers(sizes);
  const at::Tensor values = (at::arange(numel, at::kLong) * 7 + seed).remainder(120).view(sizes);
  return values.to(dtype == at::kFloat8_e4m3fn ? at::kHalf : dtype).to(dtype);
}

// A tensor by its name, with the rows that torch.chunk gives a rank.
CheckpointTensor rows_of(const std::string& name, const at::Tensor& whole, int64_t rank,
                         int64_t ranks) {
  const int64_t most = (whole.size(0) + ranks - 1) / ranks;
  const int64_t first = std::min(rank * most, whole.size(0));
  std::vector<int64_t> begin(static_cast<size_t>(whole.dim()), 0);
  begin[0] = first;
  const at::Tensor part = whole.narrow(0, first, std::min(most, whole.size(0) - first));
  return {name, whole.scalar_type(), whole.sizes().vec(), {part, begin}};
}

CheckpointTensor columns_of(const std::string& name, const at::Tensor& whole, int64_t rank) {
  const int64_t half = whole.size(1) / 2;
  const int64_t count = rank == 0 ? half : whole.size(1) - half;
  const at::Tensor part = whole.narrow(1, rank * half, count);
  return {name, whole.scalar_type(), whole.sizes().vec(), {part, {0, rank * half}}};
}

// The same with memory of its own, in which nothing is right.
CheckpointTensor to_fill(CheckpointTensor tensor) {
  tensor.part.values = at::zeros(tensor.part.values.sizes(), tensor.part.values.options());
  return tensor;
}

bool are_bits(const at::Tensor& one, const at::Tensor& other) {
  const auto bytes = [](const at::Tensor& it) {
    return it.contiguous().view({-1}).view(at::kByte);
  };
  return one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
         (one.numel() == 0 || at::equal(bytes(one), bytes(other)));
}

// Collects what is wrong on any rank.
class Wrong {
 public:
  void add(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.push_back(what);
  }
  void unless_filled(const CheckpointTensor& got, const CheckpointTensor& expected) {
    if (!are_bits(got.part.values, expected.part.values)) add("'" + got.name + "' differs");
  }
  const std::vector<std::string>& found() const { return found_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> found_;
};

using Strings = std::vector<std::string>;

// Four ranks hold rows; afterwards the first two have columns, and all have another tensor wholly.
Strings four_to_two(Engine engine) {
  Wrong wrong;
  run_thread_ranks(
      4,
      [&](ThreadRank& rank) {
        const int64_t own = rank.where.rank;
        RedistributeRequest request;
        std::vector<CheckpointTensor> expected;
        for (const at::ScalarType dtype : kDtypes) {
          const std::string name = c10::toString(dtype);
          const at::Tensor matrix = whole_of(dtype, {5, 7}, 1), line = whole_of(dtype, {6}, 2);
          request.held.push_back(rows_of(name, matrix, own, 4));
          request.held.push_back(rows_of(name + ".line", line, own, 4));
          if (own < 2) expected.push_back(columns_of(name, matrix, own));
          expected.push_back({name + ".line", dtype, {6}, {line}});
        }
        for (const CheckpointTensor& tensor : expected) request.needed.push_back(to_fill(tensor));
        redistribute(request, {rank.communicator});
        for (size_t i = 0; i < expected.size(); ++i)
          wrong.unless_filled(request.needed[i], expected[i]);
      },
      std::chrono::seconds(60), engine);
  return wrong.found();
}

}  // namespace

TEST_CASE("four ranks with rows become two with columns, of any dtype") {
  CHECK(four_to_two(Engine::kShm) == Strings());
  CHECK(four_to_two(Engine::kGloo) == Strings());
}

TEST_CASE("scalars, empty parts, transposed memory and other dtypes of the target") {
  Wrong wrong;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const bool is_first = rank.where.rank == 0;
        const at::Tensor scalar = at::full({}, 3.5, at::kDouble);
        const at::Tensor wide = whole_of(at::kFloat, {3, 4}, 1);
        RedistributeRequest request;
        if (is_first)
          request.held = {{"scalar", at::kDouble, {}, {scalar}},
                          {"wide", at::kFloat, {3, 4}, {wide.t().contiguous().t()}}};
        request.held.push_back({"empty", at::kFloat, {0, 3}, {at::empty({0, 3})}});
        const at::Tensor got_scalar = at::zeros({}, at::kDouble);
        const at::Tensor got_wide = at::zeros({4, 3}, at::kHalf).t();
        request.needed = {{"scalar", at::kDouble, {}, {got_scalar}},
                          {"wide", at::kFloat, {3, 4}, {got_wide}},
                          {"empty", at::kFloat, {0, 3}, {at::empty({0, 3})}}};
        const auto version = got_scalar._version();
        redistribute(request, {rank.communicator});
        if (!are_bits(got_scalar, scalar)) wrong.add("the scalar");
        if (!are_bits(got_wide, wide.to(at::kHalf))) wrong.add("the transposed one");
        if (got_scalar._version() == version) wrong.add("the version of what was written");
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(wrong.found() == Strings());
}

TEST_CASE("one process without a group, and values with a put-off conjugation") {
  const at::Tensor values = whole_of(at::kComplexFloat, {4}, 1).mul(c10::complex<float>(1, 2));
  const at::Tensor got = at::zeros({2}, at::kComplexFloat);
  redistribute({.held = {{"z", at::kComplexFloat, {4}, {values.conj()}}},
                .needed = {{"z", at::kComplexFloat, {4}, {got, {2}}}}},
               {});
  CHECK(at::equal(got, values.conj().resolve_conj().slice(0, 2)));
}

TEST_CASE("parts larger than a message take several, and little memory beside") {
  constexpr int64_t kNumel = 24 << 20;  // 96 MiB
  Wrong wrong;
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        const bool holds = rank.where.rank != 2;
        const at::Tensor whole = at::arange(holds ? kNumel : 0, at::kFloat);
        const at::Tensor got = at::zeros({holds ? 0 : kNumel});
        RedistributeRequest request;
        if (holds) request.held = {{"w", at::kFloat, {kNumel}, {whole}}};
        if (!holds) request.needed = {{"w", at::kFloat, {kNumel}, {got}}};
        redistribute(request, {rank.communicator});
        if (!holds && !at::equal(got, at::arange(kNumel, at::kFloat))) wrong.add("the values");
      },
      std::chrono::seconds(60), Engine::kShm);
  CHECK(wrong.found() == Strings());
}

TEST_CASE("a shard that is a view of the whole stays; other overlaps are refused") {
  const at::Tensor whole = at::arange(6, at::kFloat);
  const std::vector<CheckpointTensor> held{{"w", at::kFloat, {6}, {whole}}};
  redistribute({.held = held, .needed = {{"w", at::kFloat, {6}, {whole.slice(0, 2, 4), {2}}}}}, {});
  CHECK(at::equal(whole, at::arange(6, at::kFloat)));
  const std::string error = error_of([&] {
    redistribute({.held = held, .needed = {{"w", at::kFloat, {6}, {whole.slice(0, 2, 4), {1}}}}},
                 {});
  });
  CHECK(error.find("got memory for 'w' that lies over 'w', which is to be sent") !=
        std::string::npos);
  CHECK(at::equal(whole, at::arange(6, at::kFloat)));
}

TEST_CASE("all ranks name the missing element, the refused tensor and the double name") {
  Wrong wrong;
  run_thread_ranks(
      2,
      [&](ThreadRank& rank) {
        const auto expect = [&](const RedistributeRequest& request, const std::string& part) {
          const std::string error = error_of([&] { redistribute(request, {rank.communicator}); });
          if (error.find(part) == std::string::npos) wrong.add(error);
        };
        const at::Tensor got = at::zeros({4, 3});
        const at::Tensor half = at::ones({2, 3});
        const std::vector<CheckpointTensor> needed{{"w", at::kFloat, {4, 3}, {got}}};
        RedistributeRequest request{.needed = needed};
        if (rank.where.rank == 1) request.held = {{"w", at::kFloat, {4, 3}, {half}}};
        expect(request, "got no rank that holds 'w'[2:4, 0:3], which rank 0 needs");
        if (!got.eq(0).all().item<bool>()) wrong.add("something was written");
        if (rank.where.rank == 1)
          request.held = {{"w", at::kFloat, {4, 3}, {at::ones({4, 3}).to_sparse()}}};
        expect(request, "'w' as Float in layout Sparse on cpu");
        request.held = {needed[0], needed[0]};
        expect(request, "two tensors called 'w'");
        // And goes on.
        request = {.held = {{"w", at::kFloat, {4, 3}, {at::ones({4, 3})}}}, .needed = needed};
        redistribute(request, {rank.communicator});
        if (!got.eq(1).all().item<bool>()) wrong.add("the values after an error");
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(wrong.found() == Strings());
}

TEST_CASE("an exception of one rank in the middle is raised on all") {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    Wrong wrong;
    run_thread_ranks(
        3,
        [&](ThreadRank& rank) {
          const bool is_bad = rank.where.rank == 1;
          // Memory in which elements share a place cannot be written.
          const at::Tensor got = is_bad ? at::zeros({1}).expand({4}) : at::zeros({4});
          RedistributeRequest request{.needed = {{"w", at::kFloat, {4}, {got}}}};
          if (rank.where.rank == 0) request.held = {{"w", at::kFloat, {4}, {at::ones({4})}}};
          const std::string error = error_of([&] { redistribute(request, {rank.communicator}); });
          if (error.find("more than one element of the written-to tensor") == std::string::npos)
            wrong.add(error);
          if (!is_bad && error.find("redistribute: ") == std::string::npos) wrong.add(error);
        },
        std::chrono::seconds(30), engine);
    CHECK(wrong.found() == Strings());
  }
}

TEST_CASE("a reader that reads once gives every rank what reading by each gives") {
  const TemporaryFolder folder;
  const at::Tensor matrix = whole_of(at::kFloat, {7, 5}, 3), line = whole_of(at::kLong, {9}, 4);
  const CheckpointContent content{
      {{kModelTensors,
        {{"matrix", at::kFloat, {7, 5}, {matrix}}, {"line", at::kLong, {9}, {line}}}}},
      {}};
  save_checkpoint({folder.at("checkpoint"), content}, {});
  Wrong wrong;
  run_thread_ranks(
      3,
      [&](ThreadRank& rank) {
        const int64_t own = rank.where.rank;
        // Two ranks need all of a matrix, one its last rows, and each another dtype of the line.
        const auto dtype = own == 0 ? at::kLong : at::kInt;
        const CheckpointTensor expected =
            own == 2 ? rows_of("matrix", matrix, 2, 3)
                     : CheckpointTensor{"matrix", at::kFloat, {7, 5}, {matrix}};
        const CheckpointTensor expected_line{"line", at::kLong, {9}, {line.to(dtype)}};
        const std::vector<CheckpointTensor> got{to_fill(expected), to_fill(expected_line)};
        const CheckpointReader reader(folder.at("checkpoint"), {rank.communicator}, {.once = true});
        reader.check(kModelTensors, got);
        reader.read(kModelTensors, got);
        wrong.unless_filled(got[0], expected);
        wrong.unless_filled(got[1], expected_line);
      },
      std::chrono::seconds(30), Engine::kShm);
  CHECK(wrong.found() == Strings());
}

}  // namespace trireme::redistribute_test

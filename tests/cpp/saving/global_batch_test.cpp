// The rows of a step: the same ones on any number of ranks, and in Python.

#include <trireme/saving/global_batch.h>

#include <catch_torch.h>
#include <string>
#include <vector>

namespace trireme::global_batch_test {

using trireme::test::error_of;

namespace {

std::vector<int64_t> numbers(const at::Tensor& rows) {
  const at::Tensor plain = rows.contiguous();
  const auto* data = plain.const_data_ptr<int64_t>();
  return {data, data + plain.numel()};
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("rows are those that Python's test knows") {
  GlobalBatch batches({.rows = 11, .size = 5, .seed = 3, .where = RankOf{1, 3}});
  CHECK(numbers(batches.whole(0)) == std::vector<int64_t>{8, 9, 5, 6, 7});
  CHECK(numbers(batches.whole(5)) == std::vector<int64_t>{3, 9, 1, 5, 0});
  const BatchPart part = batches.part(5);
  CHECK(part.number == 5);
  CHECK(part.epoch == 2);
  CHECK(part.weight == 2 * 3 / 5.0);
  CHECK(at::equal(part.rows, batches.whole(5).narrow(0, 2, 2)));
}

TEST_CASE("parts of any number of ranks are the batch, by weights or equally many") {
  for (const std::vector<double>& balance :
       {std::vector<double>{}, std::vector<double>{1, 0, 2.5}, std::vector<double>{0, 1e-9, 0}}) {
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < 3; ++rank) {
      GlobalBatch batches({.rows = 20, .size = 7, .balance = balance, .where = RankOf{rank, 3}});
      parts.push_back(batches.part(4).rows);
    }
    CHECK(at::equal(at::cat(parts), GlobalBatch({.rows = 20, .size = 7}).whole(4)));
  }
  GlobalBatch uneven({.rows = 20, .size = 7, .balance = {1, 0, 2.5}, .where = RankOf{0, 3}});
  CHECK(uneven.part(0, {0, 3}).rows.numel() == 2);
  CHECK(uneven.part(0, {1, 3}).rows.numel() == 0);
  CHECK(uneven.part(0, {2, 3}).rows.numel() == 5);
}

TEST_CASE("a state is that of any number of ranks, and of these rows alone") {
  GlobalBatch batches({.rows = 20, .size = 6, .where = RankOf{0, 2}});
  batches.part(3);
  CHECK(batches.next_step() == 4);
  GlobalBatch other({.rows = 20, .size = 6, .where = RankOf{2, 3}});
  other.load_state(batches.state());
  CHECK(other.next_step() == 4);
  GlobalBatch larger({.rows = 21, .size = 6});
  const std::string error = error_of([&] { larger.load_state(batches.state()); });
  CHECK(has(error, "rows=20, expected rows=21"));
  CHECK(has(error_of([&] { larger.load_state("[]"); }), "no state of a GlobalBatch"));
}

TEST_CASE("what gives no batch is refused") {
  CHECK(has(error_of([] { GlobalBatch({.rows = 3, .size = 4}); }), "got rows=3 and size=4"));
  CHECK(has(error_of([] { GlobalBatch({.rows = 3, .size = 1, .balance = {-1}}); }),
            "got -1 in the balance"));
  CHECK(has(error_of([] { GlobalBatch({.rows = 3, .size = 1, .balance = {1, 1}}); }),
            "got a balance of 2 numbers for 1 ranks"));
  GlobalBatch batches({.rows = 3, .size = 1});
  CHECK(has(error_of([&] { batches.part(-1); }), "got step -1"));
  CHECK(has(error_of([&] { batches.part(0, {2, 2}); }), "the part of rank 2 of 2"));
}

}  // namespace trireme::global_batch_test

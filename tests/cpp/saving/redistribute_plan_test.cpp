// Who sends what to whom: pictures, then random cuts in which each element comes exactly once.

#include <trireme/saving/redistribute_plan.h>

#include <algorithm>
#include <catch_torch.h>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace trireme::redistribute_plan_test {

using test::error_of;

namespace {

// Rows [first, first + count) of a tensor of floats.
TensorPlace rows(const std::string& name, std::vector<int64_t> sizes, int64_t first,
                 int64_t count) {
  TensorBox box = whole_box(sizes);
  box.first[0] = first;
  box.sizes[0] = count;
  return {name, at::kFloat, std::move(sizes), std::move(box)};
}

TensorPlace whole(const std::string& name, std::vector<int64_t> sizes) {
  TensorBox box = whole_box(sizes);
  return {name, at::kFloat, std::move(sizes), std::move(box)};
}

TensorPlace none(const std::string& name, std::vector<int64_t> sizes) {
  return {name, at::kFloat, std::move(sizes)};
}

std::string picture(const PlacesByRank& held, const PlacesByRank& needed,
                    std::vector<int64_t> hosts = {}) {
  return plan_redistribute({.held = held, .needed = needed, .hosts = std::move(hosts)}, {0, 1})
      .text();
}

}  // namespace

TEST_CASE("a rank keeps what it has: from ddp to fully_shard nothing moves") {
  const TensorPlace all = whole("w", {5, 2});
  CHECK(
      picture({{all}, {all}, {all}},
              {{rows("w", {5, 2}, 0, 2)}, {rows("w", {5, 2}, 2, 2)}, {rows("w", {5, 2}, 4, 1)}}) ==
      "rank 0 keeps 'w'[0:2, 0:2]\n"
      "rank 1 keeps 'w'[2:4, 0:2]\n"
      "rank 2 keeps 'w'[4:5, 0:2]\n");
}

TEST_CASE("from fully_shard to ddp each rank tells all others its rows") {
  const TensorPlace all = whole("w", {5, 2});
  CHECK(picture({{rows("w", {5, 2}, 0, 3)}, {rows("w", {5, 2}, 3, 2)}, {none("w", {5, 2})}},
                {{all}, {all}, {all}}) ==
        "rank 0 keeps 'w'[0:3, 0:2]\n"
        "rank 1 keeps 'w'[3:5, 0:2]\n"
        "rank 0 -> 1, 2: 'w'[0:3, 0:2]\n"
        "rank 1 -> 0, 2: 'w'[3:5, 0:2]\n");
}

TEST_CASE("four ranks become two, and two four") {
  PlacesByRank four, two;
  for (int64_t rank = 0; rank < 4; ++rank) {
    four.push_back({rows("w", {7}, 2 * rank, rank == 3 ? 1 : 2)});
    two.push_back({rank < 2 ? rows("w", {7}, 4 * rank, rank == 0 ? 4 : 3) : none("w", {7})});
  }
  CHECK(picture(four, two) ==
        "rank 0 keeps 'w'[0:2]\n"
        "rank 1 -> 0: 'w'[2:4]\n"
        "rank 2 -> 1: 'w'[4:6]\n"
        "rank 3 -> 1: 'w'[6:7]\n");
  CHECK(picture(two, four) ==
        "rank 0 keeps 'w'[0:2]\n"
        "rank 0 -> 1: 'w'[2:4]\n"
        "rank 1 -> 2: 'w'[4:6]\n"
        "rank 1 -> 3: 'w'[6:7]\n");
}

TEST_CASE("a layer moves to another stage with its optimizer state, in one message") {
  const auto layer = [](const std::string& name) {
    return std::vector<TensorPlace>{whole(name + ".weight", {2, 2}), whole(name + ".bias", {2}),
                                    whole(name + ".weight.exp_avg", {2, 2}),
                                    whole(name + ".weight.step", {})};
  };
  std::vector<TensorPlace> both = layer("0");
  for (const TensorPlace& place : layer("1")) both.push_back(place);
  CHECK(picture({both, layer("2")}, {layer("0"),
                                     [&] {
                                       std::vector<TensorPlace> after = layer("1");
                                       for (const TensorPlace& place : layer("2"))
                                         after.push_back(place);
                                       return after;
                                     }()}) ==
        "rank 0 keeps '0.weight'[0:2, 0:2], '0.bias'[0:2], '0.weight.exp_avg'[0:2, 0:2], "
        "'0.weight.step'\n"
        "rank 1 keeps '2.weight'[0:2, 0:2], '2.bias'[0:2], '2.weight.exp_avg'[0:2, 0:2], "
        "'2.weight.step'\n"
        "rank 0 -> 1: '1.weight'[0:2, 0:2], '1.bias'[0:2], '1.weight.exp_avg'[0:2, 0:2], "
        "'1.weight.step'\n");
}

TEST_CASE("what several ranks hold all of them send, in pieces") {
  const TensorPlace all = whole("w", {6, 2});
  const PlacesByRank held{{all}, {all}, {}, {}}, needed{{}, {}, {all}, {}};
  const RedistributePlan plan =
      plan_redistribute({.held = held, .needed = needed, .message_bytes = 2 * 2 * 4}, {0, 4});
  CHECK(plan.text() ==
        "rank 0 -> 2: 'w'[0:2, 0:2]\n"
        "rank 1 -> 2: 'w'[2:4, 0:2]\n"
        "rank 0 -> 2: 'w'[4:6, 0:2]\n");
}

TEST_CASE("a holder of the same host sends, and a host gets nothing twice") {
  const TensorPlace all = whole("w", {2});
  CHECK(picture({{all}, {}, {all}, {}}, {{}, {all}, {}, {all}}, {0, 0, 1, 1}) ==
        "rank 0 -> 1: 'w'[0:2]\n"
        "rank 2 -> 3: 'w'[0:2]\n");
  CHECK(picture({{all}, {}, {}, {}, {}}, {{}, {}, {all}, {all}, {all}}, {0, 0, 1, 1, 1}) ==
        "rank 0 -> 2: 'w'[0:2]\n"
        "rank 2 -> 3, 4: 'w'[0:2], forwarded\n");
}

TEST_CASE("buffers are those of the lowest rank") {
  const TensorPlace all = whole("seen", {2});
  const PlacesByRank held{{}, {all}, {all}}, needed{{all}, {all}, {all}};
  CHECK(plan_redistribute({.held = held, .needed = needed, .of_lowest = {"seen"}}, {0, 3}).text() ==
        "rank 1 keeps 'seen'[0:2]\n"
        "rank 1 -> 0, 2: 'seen'[0:2]\n");
}

TEST_CASE("tiles become rows, and rows tiles") {
  const auto tile = [](int64_t row, int64_t column) {
    return TensorPlace{"w", at::kFloat, {4, 4}, TensorBox{{2 * row, 2 * column}, {2, 2}}};
  };
  const PlacesByRank tiles{{tile(0, 0)}, {tile(0, 1)}, {tile(1, 0)}, {tile(1, 1)}};
  const PlacesByRank strips{
      {rows("w", {4, 4}, 0, 1)}, {rows("w", {4, 4}, 1, 1)}, {rows("w", {4, 4}, 2, 2)}, {}};
  CHECK(picture(tiles, strips) ==
        "rank 0 keeps 'w'[0:1, 0:2]\n"
        "rank 1 keeps 'w'[1:2, 2:4]\n"
        "rank 2 keeps 'w'[2:4, 0:2]\n"
        "rank 0 -> 1: 'w'[1:2, 0:2]\n"
        "rank 1 -> 0: 'w'[0:1, 2:4]\n"
        "rank 3 -> 2: 'w'[2:4, 2:4]\n");
}

TEST_CASE("what nobody needs, and what has no elements, does not move") {
  CHECK(picture({{whole("more", {2})}, {}}, {{none("empty", {0, 3})}, {none("empty", {0, 3})}})
            .empty());
}

TEST_CASE("a missing element is named with its tensor, its range and who needs it") {
  const PlacesByRank held{{rows("w", {4, 3}, 0, 2)}, {}}, needed{{}, {rows("w", {4, 3}, 1, 3)}};
  const std::string error =
      error_of([&] { plan_redistribute({.held = held, .needed = needed}, {0, 2}); });
  CHECK(error.find("got no rank that holds 'w'[2:4, 0:3], which rank 1 needs (rank 0 of 2)") !=
        std::string::npos);
}

TEST_CASE("tensors of other sizes or dtypes are named with both ranks") {
  TensorPlace other = whole("w", {2});
  other.dtype = at::kDouble;
  const PlacesByRank floats{{whole("w", {2})}, {}}, doubles{{}, {other}},
      longer{{}, {whole("w", {3})}};
  const std::string dtypes =
      error_of([&] { plan_redistribute({.held = floats, .needed = doubles}, {0, 2}); });
  CHECK(
      dtypes.find("got 'w' as Float of sizes [2] on rank 0 and as Double of sizes [2] on rank 1") !=
      std::string::npos);
  const std::string sizes =
      error_of([&] { plan_redistribute({.held = floats, .needed = longer}, {0, 2}); });
  CHECK(sizes.find("as Float of sizes [2] on rank 0 and as Float of sizes [3] on rank 1") !=
        std::string::npos);
}

TEST_CASE("each element is read by one of the ranks that need it, and all read as much") {
  const TensorPlace all = whole("w", {4, 2});
  const PlacesByRank reads =
      plan_reads({{all, whole("b", {8})}, {all}, {rows("w", {4, 2}, 3, 1)}}, 2 * 4);
  const PlacesByRank expected{{rows("w", {4, 2}, 0, 1), rows("w", {4, 2}, 2, 1), whole("b", {8})},
                              {rows("w", {4, 2}, 1, 1)},
                              {rows("w", {4, 2}, 3, 1)}};
  const bool is_same = reads == expected;
  CHECK(is_same);
}

TEST_CASE("what ranks need as different dtypes each reads itself") {
  TensorPlace half = whole("w", {2});
  half.dtype = at::kHalf;
  const PlacesByRank reads = plan_reads({{whole("w", {2})}, {half}});
  CHECK(reads.size() == 2);
  CHECK(reads[0].empty());
  CHECK(reads[1].empty());
}

namespace {

using Numbers = std::mt19937;

int64_t draw(Numbers& numbers, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(numbers);
}

// A random part, which may be empty.
TensorPlace draw_part(Numbers& numbers, const TensorPlace& tensor) {
  TensorPlace part = tensor;
  part.box = whole_box(tensor.sizes);
  for (size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    part.box->first[dim] = draw(numbers, 0, std::max<int64_t>(tensor.sizes[dim] - 1, 0));
    part.box->sizes[dim] = draw(numbers, 0, tensor.sizes[dim] - part.box->first[dim]);
  }
  if (part.box->numel() == 0) part.box.reset();
  return part;
}

struct Situation {
  std::vector<TensorPlace> tensors;
  PlacesByRank held, needed;
  std::vector<int64_t> hosts;
  int64_t message_bytes;

  explicit Situation(Numbers& numbers) : message_bytes(4 * draw(numbers, 1, 20)) {
    const auto world = static_cast<size_t>(draw(numbers, 1, 6));
    held.resize(world);
    needed.resize(world);
    for (size_t rank = 0; rank < world; ++rank) hosts.push_back(draw(numbers, 0, 2));
    for (int64_t number = 0; number < 3; ++number) {
      std::vector<int64_t> sizes;
      for (int64_t dims = draw(numbers, 0, 3); dims > 0; --dims)
        sizes.push_back(draw(numbers, 0, 5));
      const TensorPlace tensor = none("t" + std::to_string(number), sizes);
      tensors.push_back(tensor);
      const bool is_held = draw(numbers, 0, 9) > 0;  // by some rank wholly
      for (size_t rank = 0; rank < world; ++rank) {
        if (draw(numbers, 0, 2) > 0) held[rank].push_back(draw_part(numbers, tensor));
        if (draw(numbers, 0, 2) > 0) needed[rank].push_back(draw_part(numbers, tensor));
      }
      if (!is_held) continue;
      auto& lucky = held[static_cast<size_t>(draw(numbers, 0, int64_t(world) - 1))];
      std::erase_if(lucky, [&](const TensorPlace& place) { return place.name == tensor.name; });
      lucky.push_back(whole(tensor.name, sizes));
      if (tensor.sizes.empty() || lucky.back().box->numel() > 0) continue;
      lucky.back().box.reset();
    }
  }

  at::Tensor mask(const PlacesByRank& places, size_t rank, const std::string& name,
                  const std::vector<int64_t>& sizes) const {
    at::Tensor found = at::zeros(sizes, at::kInt);
    for (const TensorPlace& place : places[rank])
      if (place.name == name && place.box) values_in(found, {}, *place.box).fill_(1);
    return found;
  }
};

// Returns what is wrong with a plan; "" if each element comes once, from a rank that has it.
std::string wrong_with(const RedistributePlan& plan, const Situation& situation) {
  for (size_t index = 0; index < plan.tensors.size(); ++index) {
    const auto& tensor = plan.tensors[index];
    std::vector<at::Tensor> held, came;
    for (size_t rank = 0; rank < situation.held.size(); ++rank) {
      held.push_back(situation.mask(situation.held, rank, tensor.name, tensor.sizes));
      came.push_back(at::zeros(tensor.sizes, at::kInt));
    }
    const auto all_there = [&](const at::Tensor& mask, const TensorBox& box) {
      return values_in(mask, {}, box).gt(0).all().item<bool>();
    };
    for (size_t rank = 0; rank < plan.kept.size(); ++rank)
      for (const auto& piece : plan.kept[rank]) {
        if (piece.tensor != index) continue;
        if (!all_there(held[rank], piece.box)) return "a rank keeps what it has not";
        values_in(came[rank], {}, piece.box).add_(1);
      }
    for (const auto& message : plan.messages) {
      if (plan.bytes_of(message) > situation.message_bytes) return "a message is too large";
      for (const auto& piece : message.pieces) {
        if (piece.tensor != index) continue;
        const auto from = static_cast<size_t>(message.from);
        if (!all_there(message.is_forwarded ? came[from] : held[from], piece.box))
          return "a rank sends what it has not";
        for (const int64_t to : message.to)
          values_in(came[static_cast<size_t>(to)], {}, piece.box).add_(1);
      }
    }
    for (size_t rank = 0; rank < came.size(); ++rank)
      if (!at::equal(came[rank], situation.mask(situation.needed, rank, tensor.name, tensor.sizes)))
        return "'" + tensor.name + "' is not there once on rank " + std::to_string(rank);
  }
  return "";
}

// Returns whether ranks hold all that is needed.
bool is_complete(const Situation& situation) {
  for (const TensorPlace& tensor : situation.tensors) {
    at::Tensor held = at::zeros(tensor.sizes, at::kInt), needed = held.clone();
    for (size_t rank = 0; rank < situation.held.size(); ++rank) {
      held += situation.mask(situation.held, rank, tensor.name, tensor.sizes);
      needed += situation.mask(situation.needed, rank, tensor.name, tensor.sizes);
    }
    if (at::logical_and(needed.gt(0), held.eq(0)).any().item<bool>()) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("in random situations each element comes once, from a rank that has it") {
  Numbers numbers(5);
  std::vector<std::string> wrong;
  int64_t complete = 0, incomplete = 0;
  for (int64_t round = 0; round < 400; ++round) {
    const Situation situation(numbers);
    const RedistributePlanRequest request{.held = situation.held,
                                          .needed = situation.needed,
                                          .hosts = situation.hosts,
                                          .message_bytes = situation.message_bytes};
    if (is_complete(situation)) {
      ++complete;
      const RedistributePlan plan = plan_redistribute(request, {0, 1});
      const std::string found = wrong_with(plan, situation);
      if (!found.empty()) wrong.push_back(std::to_string(round) + ": " + found);
      if (plan.text() != plan_redistribute(request, {0, 1}).text()) wrong.push_back("not the same");
    } else {
      ++incomplete;
      const std::string error = error_of([&] { plan_redistribute(request, {0, 1}); });
      if (error.find("got no rank that holds 't") == std::string::npos) wrong.push_back(error);
    }
  }
  CHECK(wrong == std::vector<std::string>());
  CHECK(complete > 100);
  CHECK(incomplete > 10);
}

TEST_CASE("in random situations what is needed is read once") {
  Numbers numbers(6);
  int64_t wrong = 0;
  for (int64_t round = 0; round < 200; ++round) {
    const Situation situation(numbers);
    const PlacesByRank reads = plan_reads(situation.needed, situation.message_bytes);
    for (const TensorPlace& tensor : situation.tensors) {
      at::Tensor read = at::zeros(tensor.sizes, at::kInt), needed = read.clone();
      for (size_t rank = 0; rank < reads.size(); ++rank) {
        for (const TensorPlace& place : reads[rank])
          if (place.name == tensor.name) values_in(read, {}, *place.box).add_(1);
        needed += situation.mask(situation.needed, rank, tensor.name, tensor.sizes);
      }
      if (!at::equal(read, needed.gt(0).to(at::kInt))) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

}  // namespace trireme::redistribute_plan_test

// Units that are resharded among some of the ranks: what later gathers bring, over which ranks, and
// what is kept for them.

#include <trireme/comm/subgroups.h>
#include <trireme/memory/buffer_pool.h>
#include <trireme/param/param_group.h>
#include <trireme/param/prefetch.h>

#include <ATen/ATen.h>

#include <catch_torch.h>
#include <param/kinds_of_params.h>
#include <recording_communicator.h>
#include <string>
#include <thread_ranks.h>
#include <vector>

namespace trireme::pieces_test {

using trireme::test::all_kinds;
using trireme::test::error_of;
using trireme::test::RecordingCommunicator;
using trireme::test::run_thread_ranks;
using trireme::test::ThreadRank;
using trireme::test::value_of;
using trireme::test::WireRecord;

namespace {

using Strings = std::vector<std::string>;

void write_pieces(const ParamGroup& group, int64_t times) {
  for (const ShardedParam& param : group.params()) param.write_whole(value_of(param.spec(), times));
}

// Names of parameters with dimensions that are not `times` their values.
std::string unlike_pieces(const ParamGroup& group, int64_t times) {
  std::string names;
  for (const ShardedParam& param : group.params()) {
    const ShardedParamSpec& spec = param.spec();
    const auto dtype = spec.param_dtype.value_or(spec.dtype);
    const bool is_like = at::equal(param.unsharded(), value_of(spec, times).to(dtype));
    if (!is_like && !spec.sizes.empty()) names += spec.name + " ";
  }
  return names;
}

void gather_pieces(ParamGroup& group) {
  group.unshard();
  group.wait_for_unshard();
}

int64_t bytes_over(RecordingCommunicator& wire) {
  int64_t bytes = 0;
  for (const WireRecord& record : wire.records()) bytes += record.bytes;
  wire.clear();
  return bytes;
}

using Transport = std::shared_ptr<RecordingCommunicator>;

// A group of `specs`, resharded among `among` ranks, and what goes over all ranks and over those.
struct Resharded {
  Resharded(const ThreadRank& rank, int64_t among, std::vector<ShardedParamSpec> specs)
      : all(std::make_shared<RecordingCommunicator>(rank.communicator)),
        some(std::make_shared<RecordingCommunicator>(split_contiguous(*rank.communicator, among))) {
    ParamGroupRequest request{std::move(specs), all};
    request.reshards_with = some;
    group = std::make_shared<ParamGroup>(std::move(request));
  }
  Transport all;
  Transport some;
  std::shared_ptr<ParamGroup> group;
};

}  // namespace

TEST_CASE("after a gather from all ranks the next ones bring the same from a part of them") {
  const std::vector<std::pair<int64_t, int64_t>> cases{{4, 2}, {6, 2}, {6, 3}};
  for (const auto& [world, among] : cases) {
    CAPTURE(world, among);
    Strings heard(static_cast<size_t>(world));
    run_thread_ranks(world, [&, among = among](ThreadRank& rank) {
      Resharded unit(rank, among, all_kinds());
      ParamGroup& group = *unit.group;
      std::string& said = heard[static_cast<size_t>(rank.where.rank)];
      write_pieces(group, 1);
      gather_pieces(group);
      said += unlike_pieces(group, 1);
      group.reshard();
      write_pieces(group, 2);  // nobody has said so
      for (int again = 0; again < 2; ++again) {
        gather_pieces(group);
        said += unlike_pieces(group, 1);
        gather_pieces(group);  // it is there
        said += unlike_pieces(group, 1);
        group.reshard();
      }
      if (unit.all->records().size() != 1 || unit.some->records().size() != 4) said += "wire ";
      group.share_writes();
      gather_pieces(group);
      said += unlike_pieces(group, 2);
      if (group.memory().has_pieces()) group.reshard_to_all();
      write_pieces(group, 3);
      gather_pieces(group);
      said += unlike_pieces(group, 3);
    });
    for (const std::string& said : heard) CHECK(said == "");
  }
}

TEST_CASE("a part of the bytes is kept, and moved; what is kept goes when it is forgotten") {
  const std::vector<ShardedParamSpec> specs{{"a", {64, 4}}, {"b", {30}}};  // 64 x 4, 32 of floats
  constexpr int64_t kWhole = (64 * 4 + 32) * 4;
  std::vector<int64_t> seen;
  run_thread_ranks(4, [&](ThreadRank& rank) {
    Resharded unit(rank, 2, specs);
    ParamGroup& group = *unit.group;
    const auto pool = std::make_shared<BufferPool>(c10::kCPU);
    group.memory().share_pool(pool);
    write_pieces(group, 1);
    std::vector<int64_t> found;
    gather_pieces(group);
    group.reshard();
    found.push_back(pool->taken_bytes());
    gather_pieces(group);
    found.push_back(bytes_over(*unit.all));
    found.push_back(bytes_over(*unit.some));
    group.memory().forget_pieces();
    group.reshard();
    found.push_back(pool->taken_bytes());
    gather_pieces(group);
    found.push_back(bytes_over(*unit.all));
    found.push_back(bytes_over(*unit.some));
    if (rank.where.rank == 3) seen = found;
  });
  CHECK(seen == std::vector<int64_t>{kWhole / 2, kWhole / 4, kWhole / 2, 0, kWhole / 4, 0});
}

TEST_CASE("ranks that use different units agree about who gathers from whom") {
  Strings wires(4), said(4);
  run_thread_ranks(4, [&](ThreadRank& rank) {
    const auto own = static_cast<size_t>(rank.where.rank);
    std::vector<std::unique_ptr<Resharded>> units;
    std::vector<std::shared_ptr<ParamGroup>> groups;
    for (const char* name : {"a", "b"}) {
      units.push_back(
          std::make_unique<Resharded>(rank, 2, std::vector<ShardedParamSpec>{{name, {6, 3}}}));
      groups.push_back(units.back()->group);
    }
    Prefetch prefetch(groups);
    const auto use = [&](size_t unit, int64_t times) {
      prefetch.need(*groups[unit]);
      said[own] += unlike_pieces(*groups[unit], times);
      prefetch.done(*groups[unit]);
    };
    const auto gathered = [&] {  // capitals: from all ranks
      std::string letters;
      for (const auto& unit : units) {
        const std::string& name = unit->group->label();
        for (const WireRecord& record : unit->all->records())
          if (record.label.back() == name[0]) letters += static_cast<char>(std::toupper(name[0]));
        for (size_t i = 0; i < unit->some->records().size(); ++i) letters += name;
        unit->all->clear();
        unit->some->clear();
      }
      return letters + " ";
    };
    for (const int64_t times : {1, 2}) {
      for (const auto& group : groups) write_pieces(*group, times);
      prefetch.expire();
      for (const bool is_last : {false, true}) {  // two micro-batches
        prefetch.begin_forward(groups[0].get(), true);
        use(0, times);
        if (rank.where.rank % 2 == 0) use(1, times);
        prefetch.end_pass();
        wires[own] += gathered();
        prefetch.begin_backward();
        prefetch.enter_forward(prefetch.last_forward());
        if (rank.where.rank % 2 == 0) use(1, times);
        use(0, times);
        prefetch.end_pass(is_last);
        wires[own] += gathered();
      }
      if (groups[0]->memory().has_pieces()) said[own] += "pieces ";
    }
  });
  for (const size_t own : {0, 1, 2, 3}) {
    CHECK(wires[own] == "AB ab ab ab AB ab ab ab ");
    CHECK(said[own] == "");
  }
}

TEST_CASE("a gather of pieces that fails names the unit and the ranks") {
  std::string said;
  run_thread_ranks(4, [&](ThreadRank& rank) {
    Resharded unit(rank, 2, {{"a.weight", {8}}});
    write_pieces(*unit.group, 1);
    gather_pieces(*unit.group);
    unit.group->reshard();
    rank.communicator->barrier("all are here").wait();
    if (rank.where.rank == 3) {
      unit.some->announce_failure("[test] rank 3 went home");
    } else if (rank.where.rank == 2) {
      said = error_of([&] { gather_pieces(*unit.group); });
    }
  });
  CHECK_THAT(said, Catch::Contains("all_gather of unit a.weight (from ranks 2 to 3)"));
  CHECK_THAT(said, Catch::Contains("rank 3 went home"));
}

TEST_CASE("who can be resharded among") {
  const auto all = std::make_shared<RecordingCommunicator>(RankOf{1, 4});
  for (const int64_t among : {1, 3, 4}) {
    ParamGroupRequest request{{{"a", {4}}}, all};
    request.reshards_with = std::make_shared<RecordingCommunicator>(RankOf{0, among});
    CHECK_THAT(error_of<c10::ValueError>([&] { ParamGroup group(std::move(request)); }),
               Catch::Contains("[fully_shard] got " + std::to_string(among) +
                               " ranks to reshard among (rank 1 of 4). Pass a factor of 4"));
  }
  CHECK(split_contiguous(*all, 2) == nullptr);
  CHECK_THAT(error_of<c10::ValueError>([&] { split_contiguous(*all, 3); }),
             Catch::Contains("got groups of 3 ranks (rank 1 of 4)"));
}

TEST_CASE("shards that are offloaded come by way of a copy, or at each gather") {
  Strings heard(2);
  run_thread_ranks(2, [&](ThreadRank& rank) {
    std::vector<ShardedParamSpec> specs = all_kinds();
    for (size_t i = 0; i < specs.size(); ++i)
      specs[i].offload = i % 2 == 0 ? ShardOffload::kOptimizer : ShardOffload::kAll;
    ParamGroupRequest request{specs, rank.communicator};
    request.pins_memory = false;
    ParamGroup group(std::move(request));
    std::string& said = heard[static_cast<size_t>(rank.where.rank)];
    write_pieces(group, 1);
    group.share_writes();
    gather_pieces(group);
    said += unlike_pieces(group, 1);
    group.reshard();
    write_pieces(group, 2);
    gather_pieces(group);
    for (size_t i = 0; i < specs.size(); ++i) {  // a copy is made when writes are complete
      const ShardedParam& param = group.params()[i];
      const int64_t times = i % 2 == 0 ? 1 : 2;
      const auto dtype = specs[i].param_dtype.value_or(specs[i].dtype);
      if (param.unsharded().numel() > 0 &&
          !at::equal(param.unsharded(), value_of(specs[i], times).to(dtype)))
        said += specs[i].name + " ";
      const at::Tensor gradient = at::ones_like(param.sharded());
      const at::Tensor copy = group.memory().to_shard(static_cast<int64_t>(i), gradient);
      if (copy.is_same(gradient) || !at::equal(copy, gradient)) said += "gradient ";
    }
    group.share_writes();
    gather_pieces(group);
    said += unlike_pieces(group, 2);
  });
  for (const std::string& said : heard) CHECK(said == "");
}

TEST_CASE("pinned memory that is refused") {
  if (at::globalContext().hasCUDA()) return;  // where there is some
  ShardedParamSpec spec{"a.weight", {4}};
  spec.offload = ShardOffload::kAll;
  ParamGroupRequest request{{spec}, std::make_shared<RecordingCommunicator>(RankOf{1, 2})};
  const std::string said = error_of([&] { ParamGroup group(std::move(request)); });
  CHECK_THAT(said, Catch::Contains("[fully_shard] got no pinned memory for the offloaded part of "
                                   "'a.weight': "));
  CHECK_THAT(said, Catch::Contains("(rank 1 of 2). Pass pin_memory=False"));
}

}  // namespace trireme::pieces_test

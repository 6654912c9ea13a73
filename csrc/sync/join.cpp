#include <trireme/sync/join.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/exception_text.h>
#include <trireme/module/meets_ranks.h>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <exception>
#include <utility>

// See [Note: ranks with different numbers of inputs] in join.h.

namespace trireme {
namespace {

// The columns of a rank's row: the call, its joinable, flags, numbers; zeros if it has run out.
enum Column : int64_t { kWhat, kJoinable, kFlags, kNumbers };
constexpr int64_t kColumns =
    kNumbers + static_cast<int64_t>(std::tuple_size_v<decltype(JoinCall::numbers)>);

// Calls `visit` with a key for the options of each group.
template <typename Visit>
void for_each_group(const std::vector<torch::optim::Optimizer*>& optimizers, const Visit& visit) {
  int64_t number = 0;
  for (torch::optim::Optimizer* optimizer : optimizers)
    for (torch::optim::OptimizerParamGroup& group : optimizer->param_groups())
      visit(std::to_string(number++), group);
}

}  // namespace

struct Join::Round {
  int64_t joinable = 0;
  JoinCall call;
};

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options) {
  TORCH_CHECK_VALUE(!joinables_.empty(),
                    error_text("join", "got nothing that joins", {}, "Name a model or optimizer."));
  communicator_ = joinables_.front()->join_communicator();
  active_ = communicator_->world();
  for (const Joinable* one : joinables_) {
    TORCH_CHECK_VALUE(one->join_communicator() == communicator_,
                      error_text("join", "got models and optimizers of several communicators",
                                 communicator_->rank_of(), "Give all of them one."));
  }
  try {
    for (Joinable* one : joinables_) one->enter_join(this, options_);
  } catch (...) {
    for (Joinable* one : joinables_) one->enter_join(nullptr, options_);
    throw;
  }
}

Join::~Join() {
  for (Joinable* one : joinables_) {
    one->enter_join(nullptr, options_);
    one->set_join_divisor(static_cast<double>(communicator_->world()));
  }
}

void Join::run(const std::function<void()>& train) {
  try {
    train();
    has_run_out_ = true;
    for (Joinable* one : joinables_) one->run_out();
    for (;;) {
      const Round round = meet(nullptr, {});
      if (active_ == 0) break;
      joinables_[static_cast<size_t>(round.joinable)]->follow(round.call);
    }
    for (Joinable* one : joinables_) one->end_join(root_);
  } catch (...) {
    abandon(text_of(std::current_exception()));
    throw;
  }
}

void Join::abandon(const std::string& reason) noexcept {
  if (!all_raise_) communicator_->announce_failure("join was left by an exception: " + reason);
}

bool Join::any_has_run_out() const { return active_ < communicator_->world(); }

JoinCall Join::tell(const Joinable& who, JoinCall call) {
  return has_run_out_ ? call : meet(&who, call).call;
}

Join::Round Join::meet(const Joinable* who, const JoinCall& call) {
  const RankOf where = communicator_->rank_of();
  at::Tensor told = at::zeros({where.world, kColumns}, at::kDouble);
  if (who != nullptr) {
    auto* row = told.mutable_data_ptr<double>() + where.rank * kColumns;
    row[kWhat] = static_cast<double>(call.what);
    row[kJoinable] = static_cast<double>(std::find(joinables_.begin(), joinables_.end(), who) -
                                         joinables_.begin());
    row[kFlags] = static_cast<double>(call.flags);
    std::copy(call.numbers.begin(), call.numbers.end(), row + kNumbers);
  }
  told = told.to(communicator_->device());
  communicator_->all_reduce({told}, ReduceOp::kSum, "who still has inputs").wait();
  const at::Tensor heard = told.cpu();
  check_alike(heard);

  Round round;
  for (int64_t rank = 0; rank < where.world; ++rank) {
    const auto* row = heard.const_data_ptr<double>() + rank * kColumns;
    if (row[kWhat] == 0) continue;
    round.joinable = static_cast<int64_t>(row[kJoinable]);
    round.call.what = static_cast<int64_t>(row[kWhat]);
    round.call.flags |= static_cast<int64_t>(row[kFlags]);
    std::copy_n(row + kNumbers, round.call.numbers.size(), round.call.numbers.begin());
  }
  if (!options_.divide_by_initial_world_size && active_ > 0)
    for (Joinable* one : joinables_) one->set_join_divisor(static_cast<double>(active_));
  return round;
}

// Counts the ranks with inputs, and throws on all ranks where these do not go on together.
void Join::check_alike(const at::Tensor& heard) {
  const RankOf where = communicator_->rank_of();
  const double* first = nullptr;
  int64_t first_rank = 0;
  int64_t without = -1;
  active_ = 0;
  for (int64_t rank = 0; rank < where.world; ++rank) {
    const auto* row = heard.const_data_ptr<double>() + rank * kColumns;
    if (row[kWhat] == 0) {
      if (without < 0) without = rank;
      continue;
    }
    ++active_;
    if (first == nullptr) {
      first = row;
      first_rank = rank;
    }
    all_raise_ = !std::equal(row, row + kFlags, first) ||
                 !std::equal(row + kNumbers, row + kColumns, first + kNumbers);
    TORCH_CHECK(
        !all_raise_,
        error_text("join",
                   "got " + describe(first) + " on rank " + std::to_string(first_rank) + " and " +
                       describe(row) + " on rank " + std::to_string(rank) +
                       ", expected the same calls on all ranks with inputs",
                   where, "Run forward, backward, clipping and step alike on all of them."));
  }
  if (active_ > 0) root_ = first_rank;
  all_raise_ = options_.throw_on_early_termination && without >= 0 && active_ > 0;
  TORCH_CHECK(
      !all_raise_,
      error_text("join",
                 "got uneven inputs, expected as many on every rank: rank " +
                     std::to_string(without) + " has none left",
                 where, "Leave throw_on_early_termination out to go on with the other ranks."));
}

std::string Join::describe(const double* row) const {
  JoinCall call{static_cast<int64_t>(row[kWhat]), static_cast<int64_t>(row[kFlags]), {}};
  std::copy_n(row + kNumbers, call.numbers.size(), call.numbers.begin());
  return joinables_[static_cast<size_t>(row[kJoinable])]->describe(call);
}

void Join::share_options(const std::vector<torch::optim::Optimizer*>& optimizers) {
  if (!any_has_run_out()) return;
  std::string own;
  if (communicator_->rank() == root_) {
    torch::serialize::OutputArchive archive;
    for_each_group(optimizers, [&](const std::string& key, auto& group) {
      torch::serialize::OutputArchive options(archive.compilation_unit());
      group.options().serialize(options);
      archive.write(key, options);
    });
    archive.save_to([&](const void* data, size_t count) {
      own.append(static_cast<const char*>(data), count);
      return count;
    });
  }
  const std::string all = broadcast_text(own, root_, *communicator_, communicator_->device());
  if (!has_run_out_) return;
  torch::serialize::InputArchive archive;
  archive.load_from(all.data(), all.size());
  for_each_group(optimizers, [&](const std::string& key, auto& group) {
    torch::serialize::InputArchive options;
    archive.read(key, options);
    group.options().serialize(options);
  });
}

void refuse_meetings(const torch::nn::Module& module, const JoinOptions& options, const char* area,
                     RankOf where) {
  if (options.throw_on_early_termination) return;
  const std::string found = meeting_of_ranks(module, 1);
  TORCH_CHECK_VALUE(
      found.empty(),
      error_text(area,
                 "got " + found + " under join(), expected layers that need no rank without inputs",
                 where,
                 "Give such ranks empty batches in place of join(), or set "
                 "throw_on_early_termination."));
}

void join(const std::vector<JoinMember>& members, const std::function<void()>& train,
          const JoinOptions& options) {
  if (!options.enable) return train();
  std::vector<Joinable*> joinables;
  for (const JoinMember& member : members) joinables.push_back(member.get());
  Join(std::move(joinables), options).run(train);
}

}  // namespace trireme

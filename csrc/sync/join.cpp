#include <trireme/sync/join.h>

#include <trireme/common/exception_text.h>
#include <trireme/module/meets_ranks.h>

#include <torch/serialize/archive.h>

#include <algorithm>
#include <exception>
#include <utility>

// See [Note: ranks with different numbers of inputs] in join.h.

namespace trireme {
namespace {

// Calls `visit` with a key for the options of each group.
template <typename Visit>
void for_each_group(const std::vector<torch::optim::Optimizer*>& optimizers, const Visit& visit) {
  int64_t number = 0;
  for (torch::optim::Optimizer* optimizer : optimizers)
    for (torch::optim::OptimizerParamGroup& group : optimizer->param_groups())
      visit(std::to_string(number++), group);
}

}  // namespace

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)),
      meeting_(common_communicator(joinables_)),
      options_(options) {
  try {
    for (Joinable* one : joinables_) one->enter_join(this, options_);
  } catch (...) {
    for (Joinable* one : joinables_) one->enter_join(nullptr, options_);
    throw;
  }
}

std::shared_ptr<Communicator> Join::common_communicator(const std::vector<Joinable*>& joinables) {
  TORCH_CHECK_VALUE(!joinables.empty(),
                    error_text("join", "got nothing that joins", {}, "Name a model or optimizer."));
  std::shared_ptr<Communicator> communicator = joinables.front()->join_communicator();
  for (const Joinable* one : joinables) {
    TORCH_CHECK_VALUE(one->join_communicator() == communicator,
                      error_text("join", "got models and optimizers of several communicators",
                                 communicator->rank_of(), "Give all of them one."));
  }
  return communicator;
}

Join::~Join() {
  for (Joinable* one : joinables_) {
    one->enter_join(nullptr, options_);
    one->set_join_divisor(static_cast<double>(communicator().world()));
  }
}

void Join::run(const std::function<void()>& train) {
  try {
    train();
    has_run_out_ = true;
    for (Joinable* one : joinables_) one->run_out();
    for (;;) {
      const JoinCall call = meet(std::nullopt);
      if (meeting_.active() == 0) break;
      joinables_[static_cast<size_t>(call.joinable)]->follow(call);
    }
    for (Joinable* one : joinables_) one->end_join(root());
  } catch (...) {
    abandon(text_of(std::current_exception()));
    throw;
  }
}

void Join::abandon(const std::string& reason) noexcept {
  if (!all_raise_) communicator().announce_failure("join was left by an exception: " + reason);
}

JoinCall Join::tell(const Joinable& who, JoinCall call) {
  if (has_run_out_) return call;
  call.joinable = std::find(joinables_.begin(), joinables_.end(), &who) - joinables_.begin();
  return meet(call);
}

JoinCall Join::meet(const std::optional<JoinCall>& own) {
  meeting_.meet(own);
  check_alike();
  if (!options_.divide_by_initial_world_size && meeting_.active() > 0)
    for (Joinable* one : joinables_) one->set_join_divisor(static_cast<double>(meeting_.active()));
  return meeting_.call();
}

// Throws on all ranks where these do not go on together.
void Join::check_alike() {
  const RankOf where = communicator().rank_of();
  const std::vector<std::optional<JoinCall>>& calls = meeting_.calls();
  const std::optional<JoinCall>& first = calls[static_cast<size_t>(root())];
  int64_t without = -1;
  for (int64_t rank = 0; rank < where.world; ++rank) {
    const std::optional<JoinCall>& call = calls[static_cast<size_t>(rank)];
    if (!call && without < 0) without = rank;
    all_raise_ = call && !call->is_like(*first);
    TORCH_CHECK(
        !all_raise_,
        error_text("join",
                   "got " + describe(*first, root()) + " and " + describe(*call, rank) +
                       ", expected the same calls on all ranks with inputs",
                   where, "Run forward, backward, clipping and step alike on all of them."));
  }
  all_raise_ = options_.throw_on_early_termination && without >= 0 && meeting_.active() > 0;
  TORCH_CHECK(
      !all_raise_,
      error_text("join",
                 "got uneven inputs, expected as many on every rank: rank " +
                     std::to_string(without) + " has none left",
                 where, "Leave throw_on_early_termination out to go on with the other ranks."));
}

std::string Join::describe(const JoinCall& call, int64_t rank) const {
  return joinables_[static_cast<size_t>(call.joinable)]->describe(call) + " on rank " +
         std::to_string(rank);
}

void Join::share_options(const std::vector<torch::optim::Optimizer*>& optimizers) {
  if (!any_has_run_out()) return;
  std::string own;
  if (communicator().rank() == root()) {
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
  const std::string all = meeting_.text_of_root(own);
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

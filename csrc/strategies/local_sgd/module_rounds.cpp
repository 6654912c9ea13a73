#include <trireme/strategies/local_sgd/module_rounds.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/common/error.h>
#include <trireme/optim/write_gate.h>
#include <trireme/strategies/local_sgd/module_door.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <utility>

namespace trireme {
namespace {

RoundOptions options_of(const LocalSGDOptions& options) {
  return {.sync_every = options.sync_every,
          .warmup_steps = options.warmup_steps,
          .compression = options.compression};
}

RoundOptions options_of(const DiLoCoOptions& options) {
  const auto modules = static_cast<int64_t>(options.fragment_modules.size());
  return {.sync_every = options.sync_every,
          .fragments = modules > 0 ? modules : options.fragments,
          .fragment_sync_delay = options.fragment_sync_delay,
          .fragment_update_alpha = options.fragment_update_alpha,
          .compression = options.compression,
          .has_outer_step = true};
}

// Returns where this rank is, where nobody has said who is across: hosts are workers.
WorkerRanks workers_by_host(const ModuleDoor& door) {
  const std::shared_ptr<Communicator> all = current_communicator();
  WorkerRanks ranks{counterparts_on_hosts(all), ranks_of_host(all)};
  if (!ranks.inside) return ranks;
  const auto averaging = door.averages_over();
  ranks.have_all = averaging && averaging->world() == ranks.inside->world();
  TORCH_CHECK_VALUE(
      ranks.have_all || door.shards_all(),
      error_text(kRoundsArea,
                 "got across=None and ranks of a host that no strategy keeps equal, expected DDP, "
                 "ZeRO or fully_shard over them",
                 all->rank_of(),
                 "Pass across: the ranks that hold the same elements on different workers."));
  return ranks;
}

WorkerRanks ranks_for(const ModuleDoor& door, const std::shared_ptr<Communicator>& across) {
  if (!across) return workers_by_host(door);
  const auto averaging = door.averages_over();
  if (!averaging || averaging->world() == 1 || door.shards_all()) return {across};
  return {across, averaging, /*have_all=*/true};
}

// Returns what the ranks that hold the same elements on different workers have alike.
std::string place_of(const ModuleDoor& door, const WorkerRanks& ranks) {
  std::string text = "a rank of a worker";
  if (ranks.inside)
    text = c10::str("rank ", ranks.inside->rank(), " of a worker of ", ranks.inside->world());
  for (const RoundPart& part : door.parts())
    text += c10::str("\n'", part.name, "' from ", part.first, " on, of ", part.sizes);
  return text;
}

void check_outer(const std::vector<torch::optim::Optimizer*>& optimizers, size_t fragments) {
  TORCH_CHECK_VALUE(optimizers.size() <= 1 || optimizers.size() == fragments,
                    error_text(kRoundsArea,
                               c10::str("got ", optimizers.size(),
                                        " optimizers as outer_optimizer, expected one "
                                        "or ",
                                        fragments, ", one per fragment"),
                               {}, "Pass one over all parameters, or one for each fragment."));
}

}  // namespace

ModuleRounds::ModuleRounds(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                           Request request)
    : optimizer_(optimizer), exceptions_before_(std::uncaught_exceptions()) {
  check(request.options);
  door_ = std::make_shared<ModuleDoor>(TrainedModule{&module, &optimizer});
  std::vector<Fragment> fragments = request.fragment_modules.empty()
                                        ? cut_by_bytes(door_->bytes(), request.options.fragments)
                                        : door_->fragments_of(request.fragment_modules);
  check_outer(request.outer_optimizers, fragments.size());
  const WorkerRanks ranks = ranks_for(*door_, request.across);
  std::vector<RoundParameter> parameters = door_->make_parameters(ranks);
  if (request.options.has_outer_step) door_->take_outer(request.outer_optimizers, fragments);
  rounds_ = std::make_unique<Rounds>(Rounds::Setup{request.options, std::move(parameters),
                                                   std::move(fragments), ranks,
                                                   place_of(*door_, ranks), door_});
}

ModuleRounds::~ModuleRounds() {
  if (!rounds_) return;
  try {
    if (std::uncaught_exceptions() > exceptions_before_)
      rounds_->abandon("an exception has ended the program's loop");
    else
      rounds_->end();
  } catch (const std::exception& error) {
    rounds_->abandon(error.what());
  }
}

at::Tensor ModuleRounds::step(torch::optim::Optimizer::LossClosure closure) {
  if (!is_begun_) rounds_->begin();
  is_begun_ = true;
  at::Tensor loss;
  try {
    loss = trireme::step(optimizer_, std::move(closure));
  } catch (const std::exception& error) {
    rounds_->abandon(error.what());
    throw;
  }
  rounds_->after_step();
  return loss;
}

void ModuleRounds::set_weight(double weight) { rounds_->set_weight(weight); }

LocalSGD::LocalSGD(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                   const LocalSGDOptions& options)
    : ModuleRounds(module, optimizer, {.options = options_of(options), .across = options.across}) {}

DiLoCo::DiLoCo(torch::nn::Module& module, torch::optim::Optimizer& optimizer,
               const DiLoCoOptions& options)
    : ModuleRounds(module, optimizer,
                   {.options = options_of(options),
                    .outer_optimizers = options.outer_optimizers,
                    .fragment_modules = options.fragment_modules,
                    .across = options.across}) {}

}  // namespace trireme

#include <trireme/saving/checkpoints.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/saving/checkpoint_reader.h>
#include <trireme/saving/module_content.h>
#include <trireme/saving/module_save.h>
#include <trireme/saving/random_states.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

namespace trireme {
namespace {

using Ordered = nlohmann::ordered_json;

bool is_communication(const std::exception& error) {
  return dynamic_cast<const c10::DistBackendError*>(&error) != nullptr;
}

// Returns what goes into extra.json. `extra` is passed on as text, and checked with all of it.
std::string text_of_step(int64_t step, const std::string& extra, GlobalBatch* batches) {
  Ordered state = nullptr;
  if (batches != nullptr) {
    state = Ordered::parse(batches->state());
    state["next_step"] = step;
  }
  return "{\"step\": " + std::to_string(step) + ", \"extra\": " + (extra.empty() ? "{}" : extra) +
         ", \"batches\": " + state.dump() + ", \"stateful\": {}}";
}

}  // namespace

struct Checkpoints::State {
  TrainedModule trained;
  CheckpointsOptions options;
  CheckpointRanks ranks;
  std::shared_ptr<CheckpointSeries> series;
  std::optional<PendingSave> pending = std::nullopt;

  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const {
    TORCH_CHECK_VALUE(false, error_text("checkpoints", got, ranks.where(), next_step));
  }

  void warn(const std::string& text) const {
    if (ranks.where().rank == 0) TORCH_WARN(text);
  }

  // Calls `call`; an error other than of the group is logged if the options say so. Returns whether
  // there was none.
  bool or_log(const std::function<void()>& call) const {
    try {
      call();
      return true;
    } catch (const c10::Error& error) {
      if (!options.logs_errors || is_communication(error)) throw;
      warn("a save has failed, and training goes on: " + what_of(error));
      return false;
    }
  }

  // Begins a save. Throws the error of the one before, too, which wait() then throws no more.
  PendingSave begin(const ModuleSave& save) {
    try {
      return save_module(save);
    } catch (...) {
      if (pending && pending->done()) pending.reset();
      throw;
    }
  }

  // Returns a checkpoint all of whose bytes are those that were saved; nothing if it is damaged.
  std::unique_ptr<CheckpointReader> open(int64_t step, std::vector<std::string>& told) const {
    const std::string path = series->path_of(step);
    try {
      auto reader = std::make_unique<CheckpointReader>(path, ranks);
      reader->verify({kModelTensors, kOptimizerTensors, kCompressionTensors, kRandomTensors});
      const std::string extra = reader->text(kExtraText);
      if (extra.empty() || !Ordered::parse(extra).contains("step"))
        refuse("got a checkpoint in '" + path + "' that no Checkpoints has saved",
               "Load it with load_checkpoint().");
      return reader;
    } catch (const c10::Error& error) {
      if (is_communication(error)) throw;
      series->note_damaged(step);
      told.push_back("'" + path + "' is left out: " + what_of(error));
      warn(told.back());
      return nullptr;
    }
  }

  LoadedStep load(const CheckpointReader& reader, int64_t step, std::vector<std::string> told) {
    load_content(reader, trained, LoadedOn::kAllRanks, ranks);
    const Ordered saved = Ordered::parse(reader.text(kExtraText));
    if (!saved.at("stateful").empty())
      refuse("got a checkpoint with stateful " + saved.at("stateful").dump().substr(0, 200) +
                 ", expected none",
             "Load it in Python, or with load_checkpoint().");
    if (options.batches != nullptr) {
      if (saved.at("batches").is_null())
        refuse("got a checkpoint without the state of batches", "Leave `batches` out.");
      options.batches->load_state(saved.at("batches").dump());
    }
    if (!load_random(reader, ranks)) {
      told.push_back("'" + series->path_of(step) +
                     "' was saved by another number of ranks or in another language: random "
                     "numbers begin anew");
      warn(told.back());
    }
    return {saved.at("step").get<int64_t>(), saved.at("extra").dump(), series->path_of(step),
            std::move(told)};
  }
};

Checkpoints::Checkpoints(const std::string& folder, torch::nn::Module& module,
                         torch::optim::Optimizer* optimizer, CheckpointsOptions options) {
  CheckpointRanks ranks = ranks_of(options.communicator, plain_module(module));
  TORCH_CHECK_VALUE(
      options.every >= 1,
      error_text("checkpoints", c10::str("got every=", options.every, ", expected 1 or more"),
                 ranks.where(), "Save at every step, or fewer."));
  auto series = std::make_shared<CheckpointSeries>(folder, options.keep, ranks.where());
  state_ = std::make_unique<State>(
      State{{&module, optimizer}, std::move(options), std::move(ranks), std::move(series)});
}

Checkpoints::~Checkpoints() = default;

std::optional<PendingSave> Checkpoints::step(int64_t n, const std::string& extra) {
  if (n < 0) state_->refuse(c10::str("got n=", n, ", expected 0 or more"), "Count what is done.");
  return n % state_->options.every == 0 ? save(n, extra) : std::nullopt;
}

std::optional<PendingSave> Checkpoints::save(int64_t n, const std::string& extra) {
  if (n < 0) state_->refuse(c10::str("got n=", n, ", expected 0 or more"), "Count what is done.");
  if (state_->options.logs_errors) wait();
  ModuleSave save{state_->series->path_of(n), state_->trained, {}, {}};
  save.options.communicator = state_->ranks.communicator;
  save.options.optimizer = state_->trained.optimizer;
  save.options.asynchronous = state_->options.asynchronous;
  save.numbered = {state_->series, n, random_to_save(state_->ranks),
                   [&] { return text_of_step(n, extra, state_->options.batches); }};
  const bool is_begun = state_->or_log([&] { state_->pending = state_->begin(save); });
  return is_begun ? state_->pending : std::nullopt;
}

void Checkpoints::wait() {
  const std::optional<PendingSave> pending = std::exchange(state_->pending, std::nullopt);
  if (pending) state_->or_log([&] { pending->wait(); });
}

std::optional<LoadedStep> Checkpoints::load_latest() {
  wait();
  const bool is_first = state_->ranks.where().rank == 0;
  const std::string own = is_first ? nlohmann::json(state_->series->steps()).dump() : "";
  const auto steps =
      nlohmann::json::parse(gather_texts(own, state_->ranks).front()).get<std::vector<int64_t>>();
  std::vector<std::string> told;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step)
    if (const auto reader = state_->open(*step, told))
      return state_->load(*reader, *step, std::move(told));
  if (steps.empty()) return std::nullopt;
  state_->refuse("got no whole checkpoint in '" + state_->series->folder() + "': " + told.front(),
                 "Restore one, or pass another folder.");
}

}  // namespace trireme

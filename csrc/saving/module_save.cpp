#include <trireme/saving/module_save.h>

#include <trireme/common/error.h>
#include <trireme/saving/background_save.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/saving/module_content.h>

#include <c10/util/Exception.h>

#include <chrono>
#include <exception>
#include <utility>

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;

double spent_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

void say_that_saves_wait(RankOf where) {
  if (where.rank != 0) return;
  TORCH_WARN_ONCE(error_text("saving", "this group can make no second communicator", where,
                             "Saves are synchronous."));
}

// Adds what is neither the module's nor its optimizer's.
void add_rest(const ModuleSave& save, RankOf where, CheckpointContent& content) {
  if (!save.numbered.random.empty()) content.tensors[kRandomTensors] = save.numbered.random;
  std::string extra = save.options.extra;
  if (save.numbered.extra && where.rank == 0) extra = save.numbered.extra();
  if (!extra.empty()) content.texts[kExtraText] = std::move(extra);
}

PendingSave save_beside(const ModuleSave& save, const CheckpointRanks& ranks,
                        std::shared_ptr<Communicator> saver, Clock::time_point begin) {
  BackgroundSave beside;
  beside.path = save.path;
  beside.max_file_bytes = save.options.max_file_bytes;
  try {
    wait_for_earlier_saves(ranks);
    beside.content = content_of_rank(save.trained, ranks.where(), WrittenBeside::kCopied);
    add_rest(save, ranks.where(), beside.content);
    beside.written = written_with(save.trained);
    beside.check = check_of_stages(save.trained);
    if (save.numbered.series)
      save_as_step(beside, save.numbered.series, save.numbered.step, ranks.where().rank);
  } catch (...) {
    beside.failure = std::current_exception();
  }
  const std::exception_ptr failure = beside.failure;
  beside.stall_ms = spent_since(begin);
  const PendingSave pending = save_in_background(std::move(beside), ranks, std::move(saver));
  if (failure) std::rethrow_exception(failure);
  return pending;
}

PendingSave save_now(const ModuleSave& save, const CheckpointRanks& ranks,
                     Clock::time_point begin) {
  const NumberedSave& numbered = save.numbered;
  const bool keeps = numbered.series != nullptr && ranks.where().rank == 0;
  together(ranks, [&] {
    wait_for_earlier_saves(ranks);
    if (keeps) numbered.series->make_room(numbered.step);
  });
  HoldsRounds* rounds = save.options.rounds;
  CheckpointContent content =
      content_to_save(rounds == nullptr ? save.trained : TrainedModule{save.trained.module}, ranks);
  if (rounds != nullptr) rounds->add_to(content, save.trained, ranks);
  together(ranks, [&] { add_rest(save, ranks.where(), content); });
  const int64_t written = save_checkpoint({save.path, content, save.options.max_file_bytes}, ranks);
  if (keeps) numbered.series->keep_last(numbered.step);
  return finished_save(save.path, written, spent_since(begin));
}

}  // namespace

PendingSave save_module(const ModuleSave& save) {
  const Clock::time_point begin = Clock::now();
  const CheckpointRanks ranks =
      ranks_of(save.options.communicator, plain_module(*save.trained.module));
  if (!save.options.asynchronous) return save_now(save, ranks, begin);
  TORCH_CHECK_VALUE(save.options.rounds == nullptr,
                    error_text("saving", "got asynchronous=True with rounds", ranks.where(),
                               "Save rounds synchronously."));
  auto saver = communicator_of_saves(ranks);
  if (saver != nullptr || ranks.where().world == 1)
    return save_beside(save, ranks, std::move(saver), begin);
  say_that_saves_wait(ranks.where());
  return save_now(save, ranks, begin);
}

}  // namespace trireme

#include <trireme/saving/background_save.h>

#include <trireme/comm/launch/before_shutdown.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/forks.h>
#include <trireme/common/resolved.h>
#include <trireme/memory/snapshot.h>
#include <trireme/saving/checkpoint_series.h>
#include <trireme/saving/save_in_flight.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

// See [Note: a save beside training] in background_save.h.

namespace trireme {

namespace {

using SavePtr = std::shared_ptr<SaveInFlight>;

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

// The saves whose thread was not joined, or whose error may not have been fetched. Never destroyed:
// a child of fork() has no threads to join.
struct SavesInFlight {
  std::mutex mutex;
  std::vector<SavePtr> all;
  uint64_t born = forks_so_far();

  static SavesInFlight& instance() {
    static auto& saves = *new SavesInFlight;
    return saves;
  }

  void add(const SavePtr& save) {
    const std::lock_guard<std::mutex> lock(mutex);
    forget_parents();
    all.push_back(save);
  }

  template <typename Choose>
  std::vector<SavePtr> take(const Choose& choose) {
    const std::lock_guard<std::mutex> lock(mutex);
    forget_parents();
    std::vector<SavePtr> taken;
    std::erase_if(all, [&](const SavePtr& save) {
      if (!choose(*save)) return false;
      taken.push_back(save);
      return true;
    });
    return taken;
  }

  std::vector<SavePtr> now() {
    const std::lock_guard<std::mutex> lock(mutex);
    forget_parents();
    return all;
  }

 private:
  // In a forked child, leaves the parent's saves alone: their threads are not here.
  void forget_parents() {
    if (born == forks_so_far()) return;
    born = forks_so_far();
    new std::vector<SavePtr>(std::move(all));  // never destroyed
    all.clear();
  }
};

// Waits for the saves of a program at its end, also of one that calls nothing.
struct AtTheEnd {
  ~AtTheEnd() { finish_saves(); }
};

void join(SaveInFlight& save) {
  if (save.thread.joinable()) save.thread.join();
}

// Returns a part's values as a contiguous tensor of the CPU that a snapshot can take: the tensor
// itself if it is one, else a copy, pinned if it comes from a GPU.
at::Tensor readable(const at::Tensor& values) {
  if (!values.defined()) return at::empty({0});
  const bool in_place =
      values.is_cpu() && values.is_contiguous() && is_resolved(values) && !values.is_inference();
  if (in_place) return values.detach();
  const at::Tensor plain = resolved(values.detach());
  at::Tensor copy = at::empty(plain.sizes(), plain.options()
                                                 .device(c10::kCPU)
                                                 .memory_format(c10::MemoryFormat::Contiguous)
                                                 .pinned_memory(values.is_cuda()));
  return copy.copy_(plain);
}

// Returns the path that `path` means now, wherever the process works later.
std::string path_of_now(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return path.empty() || error ? path : absolute.string();
}

// Puts what can be read in the place of the parts' values, and returns it, in the content's order.
std::vector<at::Tensor> make_readable(CheckpointContent& content) {
  std::vector<at::Tensor> values;
  for (auto& [kind, tensors] : content.tensors) {
    for (CheckpointTensor& tensor : tensors) {
      values.push_back(readable(tensor.part.values));
      if (tensor.part.values.defined()) tensor.part.values = values.back();
    }
  }
  return values;
}

void run(SaveInFlight& save, BackgroundSave& content, const CheckpointRanks& ranks) {
  std::exception_ptr error;
  int64_t written = 0;
  try {
    together(ranks, [&] {
      if (content.failure) std::rethrow_exception(content.failure);
    });
    if (content.check) content.check(ranks);
    written = save_checkpoint({content.path, content.content, content.max_file_bytes,
                               save.snapshot.get(), &save.is_given_up},
                              ranks);
    if (content.after) content.after();
  } catch (...) {
    error = std::current_exception();
  }
  if (save.snapshot) save.snapshot->close();
  content = {};
  save.end(error, written);
}

void log_unfetched(SaveInFlight& save) {
  const std::lock_guard<std::mutex> lock(save.mutex);
  if (!save.error || save.is_fetched || save.where.rank != 0) return;
  save.is_fetched = true;
  TORCH_WARN(error_text("saving",
                        "the save to '" + save.path +
                            "' has failed, and nobody has called its "
                            "wait(): " +
                            text_of(save.error),
                        save.where, "The checkpoint before it is still there."));
}

void end_before_shutdown(bool is_failing) {
  if (is_failing) abort_saves("an exception, which the output of this rank shows");
  finish_saves();
}

}  // namespace

void save_as_step(BackgroundSave& save, std::shared_ptr<CheckpointSeries> series, int64_t step,
                  int64_t rank) {
  save.check = [before = std::move(save.check), series, step, rank](const CheckpointRanks& ranks) {
    if (before) before(ranks);
    together(ranks, [&] {
      if (rank == 0) series->make_room(step);
    });
  };
  if (rank == 0) save.after = [series, step] { series->keep_last(step); };
}

std::shared_ptr<Communicator> communicator_of_saves(const CheckpointRanks& ranks) {
  if (!ranks.communicator || ranks.where().world == 1) return nullptr;
  std::vector<int> all(static_cast<size_t>(ranks.where().world));
  std::iota(all.begin(), all.end(), 0);
  return ranks.communicator->split(all, "saves");
}

void wait_for_earlier_saves(const CheckpointRanks& ranks) {
  const auto is_ours = [&](const SaveInFlight& save) {
    return save.caller == std::this_thread::get_id() ||
           (save.group != nullptr && save.group == ranks.communicator.get());
  };
  std::exception_ptr unfetched;
  for (const SavePtr& save : SavesInFlight::instance().take(is_ours)) {
    join(*save);
    const std::lock_guard<std::mutex> lock(save->mutex);
    if (save->error && !save->is_fetched) unfetched = save->error;
    save->is_fetched = true;
  }
  if (unfetched) std::rethrow_exception(unfetched);
}

PendingSave save_in_background(BackgroundSave save, const CheckpointRanks& ranks,
                               std::shared_ptr<Communicator> saver) {
  static const AtTheEnd at_the_end;
  call_before_shutdown(end_before_shutdown);
  const auto begin = std::chrono::steady_clock::now();
  auto flight = std::make_shared<SaveInFlight>();
  flight->path = save.path;
  save.path = path_of_now(save.path);
  flight->where = ranks.where();
  flight->group = ranks.communicator.get();
  flight->caller = std::this_thread::get_id();
  flight->saver = saver;
  flight->is_fetched = save.failure != nullptr;  // the caller has it
  if (!save.failure) flight->snapshot = Snapshot::make(make_readable(save.content), save.written);
  const double spent = save.stall_ms;
  // The thread keeps the caller's communicator, which the other one lives as long as.
  flight->thread =
      std::thread([flight, content = std::move(save), communicator = ranks.communicator,
                   on = CheckpointRanks{std::move(saver), ranks.device}]() mutable {
        run(*flight, content, on);
        communicator.reset();
      });
  flight->call_ms = spent + milliseconds_since(begin);
  SavesInFlight::instance().add(flight);
  return PendingSave(flight);
}

PendingSave finished_save(std::string path, int64_t written_bytes, double stall_ms) {
  auto save = std::make_shared<SaveInFlight>();
  save->path = std::move(path);
  save->call_ms = stall_ms;
  save->end(nullptr, written_bytes);
  return PendingSave(std::move(save));
}

void finish_saves() noexcept {
  for (const SavePtr& save : SavesInFlight::instance().take([](const auto&) { return true; })) {
    join(*save);
    log_unfetched(*save);
  }
}

void abort_saves(const std::string& reason) noexcept {
  for (const SavePtr& save : SavesInFlight::instance().now()) {
    const std::lock_guard<std::mutex> lock(save->mutex);
    if (save->is_done) continue;
    save->is_given_up = true;
    save->is_fetched = true;  // another error ends this rank
    if (save->saver) save->saver->announce_failure("save: " + one_line(reason));
  }
}

}  // namespace trireme

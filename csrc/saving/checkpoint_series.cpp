#include <trireme/saving/checkpoint_series.h>

#include <trireme/common/exception_text.h>
#include <trireme/saving/checkpoint_folder.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

// See [Note: numbered checkpoints] in checkpoint_series.h.

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kMaking = ".saving";
constexpr size_t kStepDigits = 10;

// The series of this process, by rank and folder: ranks may be threads.
struct LivingSeries {
  std::mutex mutex;
  std::set<std::pair<int64_t, std::string>> all;

  static LivingSeries& instance() {
    static auto& living = *new LivingSeries;
    return living;
  }
};

// Returns the step of a folder's name; nothing for other names.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  name.remove_prefix(kStep.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool is_step = error == std::errc() && end == name.data() + name.size() &&
                       name.size() >= kStepDigits && name.front() != '-';
  return is_step ? std::optional<int64_t>(step) : std::nullopt;
}

std::string real_path(const std::string& folder) {
  std::error_code error;
  const fs::path found = fs::weakly_canonical(fs::absolute(folder), error);
  const std::string path = (error ? fs::path(folder) : found).string();
  return path.size() > 1 && path.ends_with('/') ? path.substr(0, path.size() - 1) : path;
}

}  // namespace

CheckpointSeries::CheckpointSeries(const std::string& folder, int64_t keep, RankOf where)
    : keep_(keep), where_(where) {
  TORCH_CHECK_VALUE(!folder.empty(), error_text("checkpoints", "got an empty path", where,
                                                "Pass a folder for the checkpoints."));
  TORCH_CHECK_VALUE(keep >= 1,
                    error_text("checkpoints", c10::str("got keep=", keep, ", expected 1 or more"),
                               where, "Keep at least the newest one."));
  const std::string path = real_path(folder);
  std::error_code missing;
  const fs::file_status status = fs::status(path, missing);
  TORCH_CHECK_VALUE(!fs::exists(status) || fs::is_directory(status),
                    error_text("checkpoints", "got '" + folder + "', which is no folder", where,
                               "Pass a folder, which need not exist yet."));
  LivingSeries& living = LivingSeries::instance();
  const std::lock_guard<std::mutex> lock(living.mutex);
  TORCH_CHECK_VALUE(living.all.emplace(where.rank, path).second,
                    error_text("checkpoints", "got a second Checkpoints in '" + folder + "'", where,
                               "Use the first one, or pass another folder."));
  folder_ = path;
}

CheckpointSeries::~CheckpointSeries() {
  LivingSeries& living = LivingSeries::instance();
  const std::lock_guard<std::mutex> lock(living.mutex);
  living.all.erase({where_.rank, folder_});
}

std::string CheckpointSeries::path_of(int64_t step) const {
  char name[32];
  std::snprintf(name, sizeof name, "step-%010lld", static_cast<long long>(step));
  return folder_ + "/" + name;
}

std::vector<int64_t> CheckpointSeries::steps() const {
  std::vector<int64_t> found;
  std::error_code missing;
  for (fs::directory_iterator it(folder_, missing), end; !missing && it != end;
       it.increment(missing)) {
    std::error_code ignored;
    if (const auto step = step_of(it->path().filename().string());
        step && it->is_directory(ignored))
      found.push_back(*step);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void CheckpointSeries::note_damaged(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  damaged_.insert(step);
}

void CheckpointSeries::make_room(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (damaged_.erase(step) == 0) return;
  const std::string path = path_of(step);
  std::string aside = path + ".damaged";
  for (int number = 2; fs::exists(fs::symlink_status(aside)); ++number)
    aside = path + ".damaged-" + std::to_string(number);
  std::error_code error;
  fs::rename(path, aside, error);
  const bool is_moved = !error || error == std::errc::no_such_file_or_directory;
  TORCH_CHECK(is_moved, error_text("checkpoints",
                                   "cannot move the damaged '" + path + "' to '" + aside +
                                       "': " + error.message(),
                                   where_, "See that the folder around it can be written."));
}

void CheckpointSeries::keep_last(int64_t step) noexcept {
  // One that stays keeps no other from being deleted.
  const auto or_warn = [&](const auto& remove) {
    try {
      remove();
    } catch (const std::exception& error) {
      TORCH_WARN(error_text("checkpoints",
                            "an old checkpoint stays in '" + folder_ + "': " + what_of(error),
                            where_, "Remove it yourself."));
    }
  };
  or_warn([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int64_t> others = steps();
    std::erase_if(others, [&](int64_t it) { return it == step || damaged_.count(it) > 0; });
    const auto kept = static_cast<size_t>(keep_ - 1);
    others.resize(others.size() > kept ? others.size() - kept : 0);
    for (const int64_t old : others)
      or_warn([&] { CheckpointFolder(path_of(old), where_).remove_checkpoint(); });
    for (const auto& entry : fs::directory_iterator(folder_)) {
      std::string name = entry.path().filename().string();
      if (!name.ends_with(kMaking)) continue;
      const auto left = step_of(name.substr(0, name.size() - kMaking.size()));
      if (left && *left != step)
        or_warn([&] { CheckpointFolder(path_of(*left), where_).abandon(); });
    }
  });
}

}  // namespace trireme

#include <trireme/saving/checkpoint_folder.h>

#include <trireme/saving/disk_room.h>

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>
#include <utility>

// See [Note: only what we wrote ourselves is deleted] in checkpoint_folder.h.

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE of linux/fs.h
constexpr int kMaxLinks = 40;      // Linux's limit

std::string model_index() { return index_name(kModelTensors); }
std::string index_in_the_making() { return model_index() + ".saving"; }

bool is_anything(const std::string& path) { return fs::exists(fs::symlink_status(path)); }

fs::path without_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

// Exchanges two folders; returns false if the file system cannot do that.
bool exchange(const std::string& one, const std::string& other) {
  if (::syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), kExchange) == 0)
    return true;
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
  throw std::system_error(errno, std::generic_category());
}

void check_not_empty(const std::string& path, RankOf where) {
  TORCH_CHECK_VALUE(!path.empty(), error_text("saving", "got an empty path", where,
                                              "Pass the folder of a checkpoint."));
}

}  // namespace

CheckpointPlace find_checkpoint(const std::string& path, RankOf where) {
  check_not_empty(path, where);
  std::error_code ignored;
  const fs::path given = without_slash(path);
  if (fs::is_directory(given, ignored)) return {given.string(), ""};
  if (fs::is_regular_file(given, ignored)) {
    const fs::path folder = given.has_parent_path() ? given.parent_path() : fs::path(".");
    return {folder.string(), given.filename().string()};
  }
  const std::string previous = CheckpointFolder(path, where).moved_away();
  TORCH_CHECK_VALUE(!previous.empty(),
                    error_text("saving", "got no folder '" + path + "'", where,
                               "Pass the folder of a checkpoint, on a disk that every rank sees."));
  return {previous, ""};
}

CheckpointFolder::CheckpointFolder(const std::string& path, RankOf where, bool can_exchange)
    : where_(where), can_exchange_(can_exchange) {
  check_not_empty(path, where);
  try {
    fs::path folder = without_slash(fs::absolute(path));
    for (int i = 0; i < kMaxLinks && fs::is_symlink(folder); ++i)
      folder = without_slash(folder.parent_path() / fs::read_symlink(folder));
    path_ = fs::weakly_canonical(folder).string();
  } catch (const std::system_error& error) {
    fail("find '" + path + "'", error.code().value());
  }
  staging_ = path_ + ".saving";
  replaced_ = path_ + ".replaced";
}

std::string CheckpointFolder::moved_away() const {
  try {
    if (!is_anything(path_) && !names_in(replaced_).empty()) return replaced_;
  } catch (const std::system_error& error) {
    fail("look at '" + replaced_ + "'", error.code().value());
  }
  return {};
}

void CheckpointFolder::begin(const SavingPlan& plan) {
  const bool is_made = make_staging();
  try {
    lock_and_clear();
  } catch (const std::system_error& error) {
    leave_staging(is_made);
    fail("use '" + path_ + "'", error.code().value());
  } catch (...) {
    leave_staging(is_made);
    throw;
  }
  try {
    make(plan);
  } catch (const std::system_error& error) {
    abandon();
    fail("make '" + staging_ + "'", error.code().value());
  } catch (...) {
    abandon();
    throw;
  }
}

void CheckpointFolder::commit(const SavingPlan& plan, const ChunkChecksums& checksums) {
  const auto indexes = index_texts(plan, previous_, checksums);
  for (const auto* texts : {&plan.texts, &indexes})
    for (const auto& [name, text] : *texts)
      if (name != model_index()) write_text(name, text);
  write_text(model_index(), indexes.at(model_index()));  // last: it exists only once all files do
  try {
    sync_folder(staging_);
    check_path();  // another process may have put something there
    take_place();
    sync_folder(fs::path(path_).parent_path().string());
  } catch (const std::system_error& error) {
    fail("replace '" + path_ + "'", error.code().value());
  }
  try {
    clear();
    remove(staging_);
  } catch (const std::system_error&) {  // This save is done; the next one tries again.
  }
  path_lock_ = {};
  staging_lock_ = {};
}

void CheckpointFolder::abandon() const noexcept {
  try {
    if (moved_away().empty()) remove(staging_);
  } catch (const std::exception&) {  // Another error is on its way, and the next save tries again.
  }
}

void CheckpointFolder::remove_checkpoint() const {
  try {
    check_path();
    remove(path_);
  } catch (const std::system_error& error) {
    fail("remove '" + path_ + "'", error.code().value());
  }
}

// Returns the index at `path` if a checkpoint of ours has written it.
std::optional<CheckpointIndex> CheckpointFolder::index_at(const std::string& path) const {
  if (!fs::is_regular_file(fs::symlink_status(path))) return std::nullopt;
  try {
    CheckpointIndex index = read_index(path, where_);
    if (!index.save.empty()) return index;
  } catch (const c10::ValueError&) {  // A file that is no index is not ours.
  }
  return std::nullopt;
}

// Returns whether the save at path_, or the one being made, replaces the save of this index.
bool CheckpointFolder::is_replaced(const CheckpointIndex& index) const {
  for (const std::string& path :
       {path_ + "/" + model_index(), staging_ + "/" + index_in_the_making()}) {
    const auto later = index_at(path);
    if (later && later->replaces == index.save) return true;
  }
  return false;
}

CheckpointFolder::Names CheckpointFolder::names_in(const std::string& folder) const {
  const std::string making = folder + "/" + index_in_the_making();
  Names names;
  if (folder == staging_ && is_anything(making)) {
    if (const auto index = index_at(making)) names = file_names(*index);
    names.insert(index_in_the_making());
    return names;
  }
  const auto index = index_at(folder + "/" + model_index());
  if (!index || (folder != path_ && !is_replaced(*index))) return names;
  names = file_names(*index);
  names.insert(index_in_the_making());
  return names;
}

void CheckpointFolder::check(const std::string& folder, const std::string& expected) const {
  const fs::file_status status = fs::symlink_status(folder);
  if (!fs::exists(status)) return;
  std::string foreign;
  if (!fs::is_directory(status)) {
    foreign = fs::is_symlink(status) ? "a symbolic link" : "a file";
  } else {
    const Names names = names_in(folder);
    std::set<std::string> others;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      const bool is_ours = names.count(name) > 0 && fs::is_regular_file(entry.symlink_status());
      if (!is_ours && !name.starts_with(".nfs")) others.insert(name);
    }
    if (!others.empty()) foreign = "'" + *others.begin() + "' in it";
  }
  TORCH_CHECK_VALUE(foreign.empty(),
                    error_text("saving",
                               "got '" + folder + "' to be replaced, expected nothing but " +
                                   expected + " there and found " + foreign,
                               where_, "Pass another path, or move elsewhere what is there."));
}

void CheckpointFolder::check_path() const {
  check(path_, "a checkpoint whose index names every file");
  std::error_code none;  // set if one of the two does not exist
  TORCH_CHECK_VALUE(!fs::equivalent(path_, fs::current_path(none), none),
                    error_text("saving",
                               "got '" + path_ +
                                   "', the folder that this process works in, which would be "
                                   "deleted when the checkpoint takes its place",
                               where_, "Pass the name of a folder in it."));
}

void CheckpointFolder::lock_and_clear() {
  // A save that ends moves its staging folder to path_ and holds both locks until it has cleared
  // up: what is locked here and is still there behind both was not that save's to remove.
  const bool is_free = staging_lock_.take(staging_) && path_lock_.take(path_);
  TORCH_CHECK_VALUE(is_free && staging_lock_.is_at(staging_),
                    error_text("saving", "got '" + path_ + "', into which another save is writing",
                               where_, "Wait for that save, or pass another path."));
  check_path();
  check(staging_, "what an interrupted save has left");
  check(replaced_, "what an interrupted save has left");
  clear();
}

// Removes the remains in and beside path_ that check() has accepted, and moves back a checkpoint
// that was moved away.
void CheckpointFolder::clear() const {
  if (moved_away().empty()) {
    remove(replaced_);
  } else {
    fs::rename(replaced_, path_);
  }
  fs::remove(path_ + "/" + index_in_the_making());
  remove_files(staging_);
}

// Returns false if something was there.
bool CheckpointFolder::make_staging() const {
  try {
    return !is_anything(staging_) && fs::create_directories(staging_);
  } catch (const std::system_error& error) {
    fail("make '" + staging_ + "'", error.code().value());
  }
}

// Removes the empty folder, unless it is another save's by now.
void CheckpointFolder::leave_staging(bool is_made) const noexcept {
  std::error_code ignored;
  if (is_made && staging_lock_.is_taken() && staging_lock_.is_at(staging_))
    fs::remove(staging_, ignored);
}

void CheckpointFolder::make(const SavingPlan& plan) {
  const auto previous = index_at(path_ + "/" + model_index());
  previous_ = previous ? previous->save : "";
  write_text(index_in_the_making(), index_texts(plan, previous_, {}).at(model_index()));
  sync_folder(staging_);
  for (const auto& [kind, files] : plan.kinds)
    for (const auto& [name, header] : files.files)
      SafetensorsFile::create(staging_ + "/" + name, header, where_);
}

// Removes only files of ours.
void CheckpointFolder::remove_files(const std::string& folder) const {
  if (!fs::is_directory(fs::symlink_status(folder))) return;
  const Names names = names_in(folder);
  for (const std::string& name : names)
    if (name != model_index() && name != index_in_the_making()) fs::remove(folder + "/" + name);
  if (!names.empty()) {
    fs::remove(folder + "/" + model_index());
    fs::remove(folder + "/" + index_in_the_making());
  }
}

// Removes files of ours; a folder that has others stays with them.
void CheckpointFolder::remove(const std::string& folder) const {
  if (!fs::is_directory(fs::symlink_status(folder))) return;
  remove_files(folder);
  std::error_code error;
  fs::remove(folder, error);
  if (error && error != std::errc::directory_not_empty) throw std::system_error(error);
}

void CheckpointFolder::take_place() const {
  if (!is_anything(path_)) return fs::rename(staging_, path_);
  if (can_exchange_ && exchange(staging_, path_)) return;
  fs::rename(path_, replaced_);
  try {
    fs::rename(staging_, path_);
  } catch (const std::system_error&) {
    fs::rename(replaced_, path_);
    throw;
  }
}

void CheckpointFolder::write_text(const std::string& name, const std::string& text) const {
  const std::string path = staging_ + "/" + name;
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) fail("make '" + path + "'", errno);
  int error = 0;
  for (size_t done = 0; done < text.size() && error == 0;) {
    const ssize_t written = ::write(descriptor, text.data() + done, text.size() - done);
    if (written >= 0) {
      done += static_cast<size_t>(written);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && ::fsync(descriptor) != 0) error = errno;
  ::close(descriptor);
  if (error != 0)
    fail("write '" + path + "'", error, disk_room(path, static_cast<int64_t>(text.size())));
}

void CheckpointFolder::sync_folder(const std::string& folder) const {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category());
  const int result = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some file systems do not support fsync of a folder.
  if (result != 0 && error != EINVAL) throw std::system_error(error, std::generic_category());
}

void CheckpointFolder::fail(const std::string& doing, int error, const std::string& more) const {
  TORCH_CHECK(false,
              error_text("saving", "cannot " + doing + ": " + std::strerror(error) + more, where_,
                         "See that the folder around it can be written and has room."));
}

}  // namespace trireme

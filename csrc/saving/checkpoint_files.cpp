#include <trireme/saving/checkpoint_files.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace trireme {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kIndexSuffix = ".safetensors.index.json";
constexpr const char* kFileSuffix = ".safetensors";
constexpr const char* kOurs = "trireme";
constexpr unsigned kExchange = 2;  // RENAME_EXCHANGE of linux/fs.h

std::string file_name(const std::string& kind, size_t number, size_t count) {
  char numbers[32];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu", number, count);
  return kind + numbers + kFileSuffix;
}

bool is_of_a_checkpoint(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  return entry.is_regular_file() && (name.ends_with(kFileSuffix) || name.ends_with(kIndexSuffix) ||
                                     name == "optimizer.json" || name == "extra.json");
}

// True where two folders have changed places; false where the file system cannot do that.
bool exchange(const std::string& one, const std::string& other) {
  if (::syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), kExchange) == 0)
    return true;
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
  throw std::system_error(errno, std::generic_category());
}

}  // namespace

std::string index_name(const std::string& kind) { return kind + kIndexSuffix; }

CheckpointFiles plan_checkpoint_files(const std::string& kind, const std::string& save,
                                      std::vector<SafetensorsEntry> tensors,
                                      int64_t max_file_bytes) {
  std::vector<std::vector<SafetensorsEntry>> parts;
  int64_t room = 0;
  for (SafetensorsEntry& tensor : tensors) {
    const int64_t bytes = tensor.bytes();
    if (parts.empty() || (bytes > room && !parts.back().empty())) {
      parts.emplace_back();
      room = max_file_bytes;
    }
    room -= bytes;
    parts.back().push_back(std::move(tensor));
  }
  CheckpointFiles files{kind, save, {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = file_name(kind, i + 1, parts.size());
    // Other programs look for "format"; "pt" says that the tensors are torch's.
    files.files[name] =
        plan_safetensors(std::move(parts[i]), {{"format", "pt"}, {kOurs, save + "/" + name}});
  }
  return files;
}

std::string index_text(const CheckpointFiles& files) {
  int64_t total_bytes = 0;
  Json lengths = Json::object();
  Json weight_map = Json::object();
  for (const auto& [name, header] : files.files) {
    lengths[name] = header.file_bytes;
    total_bytes += header.file_bytes - header.bytes;
    for (const SafetensorsEntry& entry : header.entries) weight_map[entry.name] = name;
  }
  Json index;
  index["metadata"] = {{"total_size", total_bytes},
                       {kOurs, {{"save", files.save}, {"file_bytes", std::move(lengths)}}}};
  index["weight_map"] = std::move(weight_map);
  return index.dump(2) + "\n";
}

CheckpointIndex read_index(const std::string& path, RankOf where) {
  const std::string text = read_text(path, where);
  CheckpointIndex index;
  try {
    const Json parsed = Json::parse(text);
    index.weight_map = parsed.at("weight_map").get<std::map<std::string, std::string>>();
    const Json metadata = parsed.value("metadata", Json::object());
    if (metadata.contains(kOurs)) {
      index.save = metadata.at(kOurs).at("save").get<std::string>();
      index.file_bytes = metadata.at(kOurs).at("file_bytes").get<std::map<std::string, int64_t>>();
    }
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(
        false, error_text("checkpoint", "got no index in '" + path + "': " + error.what(), where,
                          "Restore the file, or load another checkpoint."));
  }
  return index;
}

std::string read_text(const std::string& path, RankOf where) {
  const std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file.good(), error_text("checkpoint", "got no file '" + path + "'", where,
                                            "Restore the file, or load another checkpoint."));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string find_checkpoint(const std::string& path, RankOf where) {
  fs::path folder(path);
  if (!folder.has_filename()) folder = folder.parent_path();
  std::error_code ignored;
  if (fs::is_directory(folder, ignored)) return folder.string();
  const std::string previous = folder.string() + ".previous";
  TORCH_CHECK_VALUE(fs::is_directory(previous, ignored),
                    error_text("checkpoint", "got no folder '" + path + "'", where,
                               "Pass the folder of a checkpoint, on a disk that every rank sees."));
  return previous;
}

CheckpointFolder::CheckpointFolder(const std::string& path, RankOf where) : where_(where) {
  fs::path folder = fs::absolute(path).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  std::error_code ignored;
  if (fs::is_symlink(folder, ignored)) folder = fs::weakly_canonical(folder);
  path_ = folder.string();
  staging_ = path_ + ".saving";
  previous_ = path_ + ".previous";
}

void CheckpointFolder::begin() const {
  try {
    check_replaceable(path_);
    check_replaceable(staging_);
    fs::remove_all(staging_);
    fs::create_directories(staging_);
  } catch (const std::system_error& error) {
    fail("make '" + staging_ + "'", error.code().value());
  }
}

void CheckpointFolder::check_replaceable(const std::string& folder) const {
  if (!fs::exists(folder)) return;
  std::string foreign;
  if (!fs::is_directory(folder)) {
    foreign = "a file";
  } else {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder))
      if (!is_of_a_checkpoint(entry)) foreign = "'" + entry.path().filename().string() + "' in it";
  }
  TORCH_CHECK_VALUE(foreign.empty(),
                    error_text("checkpoint",
                               "got '" + folder +
                                   "' to be replaced, expected nothing but a checkpoint there and "
                                   "found " +
                                   foreign,
                               where_, "Pass another path."));
}

void CheckpointFolder::create(const CheckpointFiles& files) const {
  for (const auto& [name, header] : files.files)
    SafetensorsFile::create(staging_ + "/" + name, header, where_);
}

void CheckpointFolder::commit(const std::map<std::string, std::string>& texts) const {
  for (const auto& [name, text] : texts) write_text(name, text);
  try {
    sync_folder(staging_);
    if (!fs::exists(path_)) {
      fs::rename(staging_, path_);
    } else if (exchange(staging_, path_)) {
      abandon();  // what is there now is the previous one
    } else {
      fs::remove_all(previous_);
      fs::rename(path_, previous_);
      fs::rename(staging_, path_);
    }
    sync_folder(fs::path(path_).parent_path().string());
    // Also what an interrupted save has left: there is a newer one now.
    std::error_code ignored;
    fs::remove_all(previous_, ignored);
  } catch (const std::system_error& error) {
    fail("replace '" + path_ + "'", error.code().value());
  }
}

void CheckpointFolder::abandon() const noexcept {
  std::error_code ignored;
  fs::remove_all(staging_, ignored);
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
  if (error != 0) fail("write '" + path + "'", error);
}

void CheckpointFolder::sync_folder(const std::string& folder) const {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw std::system_error(errno, std::generic_category());
  const int result = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  // Some file systems know no fsync of a folder.
  if (result != 0 && error != EINVAL) throw std::system_error(error, std::generic_category());
}

void CheckpointFolder::fail(const std::string& doing, int error) const {
  TORCH_CHECK(false,
              error_text("checkpoint", "cannot " + doing + ": " + std::strerror(error), where_,
                         "See that the folder around it can be written and has room."));
}

}  // namespace trireme

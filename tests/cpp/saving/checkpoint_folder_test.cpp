// How a folder takes the place of another, where the file system can exchange them and where not.

#include <trireme/saving/checkpoint_folder.h>

#include <atomic>
#include <catch_torch.h>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <temporary_folder.h>
#include <thread>
#include <vector>

namespace trireme::checkpoint_folder_test {

using trireme::test::error_of;
using trireme::test::TemporaryFolder;

namespace {

namespace fs = std::filesystem;

const RankOf kOneRank{0, 1};

SavingPlan plan_of(const std::string& save) {
  SavingPlan plan;
  for (const char* kind : {kModelTensors, kOptimizerTensors})
    plan.kinds[kind] = plan_checkpoint_files(kind, save, {{"w", at::kFloat, {3}}}, 100);
  plan.texts[kExtraText] = "{}";
  return plan;
}

std::string index_in(const std::string& folder) { return folder + "/" + index_name(kModelTensors); }

// The save that a folder holds whole; empty if it holds none.
std::string save_in(const std::string& folder) {
  if (!fs::exists(index_in(folder))) return "";
  const CheckpointIndex index = read_index(index_in(folder), kOneRank);
  for (const std::string& name : file_names(index))
    if (!fs::exists(folder + "/" + name)) return "";
  return index.save;
}

// Checksums of nothing in particular: what is tested here are folders.
ChunkChecksums checksums_of(const SavingPlan& plan) {
  ChunkChecksums checksums;
  for (const auto& [kind, files] : plan.kinds)
    for (const auto& [name, header] : files.files)
      checksums[name].resize(count_chunks(header.file_bytes, kChunkBytes));
  return checksums;
}

void save(const std::string& path, const std::string& name, bool can_exchange) {
  const SavingPlan plan = plan_of(name);
  CheckpointFolder folder(path, kOneRank, can_exchange);
  folder.begin(plan);
  folder.commit(plan, checksums_of(plan));
}

size_t entries_in(const std::string& folder) {
  return static_cast<size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a checkpoint replaces another, exchanged or renamed, and nothing stays beside it") {
  for (const bool can_exchange : {true, false}) {
    const TemporaryFolder folder;
    const std::string path = folder.at("ck");
    for (const char* name : {"first", "second", "third"}) {
      save(path, name, can_exchange);
      CHECK(save_in(path) == name);
      CHECK(entries_in(folder.path) == 1);
      CHECK(entries_in(path) == 5);
    }
    CHECK(read_index(index_in(path), kOneRank).replaces == "second");
  }
}

TEST_CASE("what is put into a folder during a save is not lost") {
  for (const bool can_exchange : {true, false}) {
    const TemporaryFolder folder;
    const std::string path = folder.at("ck");
    save(path, "first", can_exchange);
    const SavingPlan plan = plan_of("second");
    CheckpointFolder next(path, kOneRank, can_exchange);
    next.begin(plan);
    CHECK(save_in(path) == "first");
    CHECK(save_in(next.staging()).empty());
    std::ofstream(path + "/notes.txt") << "mine";
    CHECK(contains(error_of([&] { next.commit(plan, checksums_of(plan)); }),
                   "found 'notes.txt' in it"));
    next.abandon();
    CHECK(save_in(path) == "first");
    CHECK(fs::exists(path + "/notes.txt"));
    CHECK(entries_in(folder.path) == 1);
  }
}

TEST_CASE("a folder that cannot take its place leaves the one before") {
  const TemporaryFolder folder;
  const std::string path = folder.at("ck");
  save(path, "first", false);
  const SavingPlan plan = plan_of("second");
  CheckpointFolder next(path, kOneRank, false);
  next.begin(plan);
  // Somebody else's, which came during the save.
  fs::create_directories(path + ".replaced/theirs");
  CHECK(contains(error_of([&] { next.commit(plan, checksums_of(plan)); }),
                 "cannot replace '" + path));
  next.abandon();
  CHECK(save_in(path) == "first");
  CHECK(fs::exists(path + ".replaced/theirs"));
  CHECK_FALSE(fs::exists(path + ".saving"));
}

TEST_CASE("of first saves into one path that begin at once each is whole or is refused") {
  constexpr int64_t kTimes = 150;
  const TemporaryFolder folder;
  std::atomic<int64_t> arrived{0};
  std::vector<std::string> wrong(2);
  const auto save_all = [&](size_t thread) {
    for (int64_t i = 0; i < kTimes; ++i) {
      ++arrived;
      while (arrived < 2 * (i + 1)) std::this_thread::yield();
      const auto begin = std::chrono::steady_clock::now();
      const std::chrono::microseconds behind(thread == 1 ? i : 0);
      while (std::chrono::steady_clock::now() < begin + behind) continue;
      const std::string path = folder.at(std::to_string(i));
      const std::string error = error_of([&] { save(path, std::to_string(thread), true); });
      if (error != "no error" && !contains(error, "into which another save is writing"))
        wrong[thread] = error;
    }
  };
  std::thread other(save_all, 1);
  save_all(0);
  other.join();
  CHECK(wrong == std::vector<std::string>(2));
  int64_t whole = 0;
  for (int64_t i = 0; i < kTimes; ++i)
    whole += int64_t{!save_in(folder.at(std::to_string(i))).empty()};
  CHECK(whole == kTimes);
  CHECK(entries_in(folder.path) == kTimes);  // nothing beside them
}

TEST_CASE("the previous checkpoint is loaded while it is moved away") {
  const TemporaryFolder folder;
  const std::string path = folder.at("ck");
  save(path, "first", false);
  {
    CheckpointFolder next(path, kOneRank, false);
    next.begin(plan_of("second"));
  }
  CHECK(find_checkpoint(path, kOneRank).folder == path);
  fs::rename(path, path + ".replaced");
  CHECK(find_checkpoint(path, kOneRank).folder == path + ".replaced");
  const SavingPlan plan = plan_of("third");
  CheckpointFolder next(path, kOneRank, false);
  next.begin(plan);
  CHECK(save_in(path) == "first");
  next.abandon();
  CHECK(entries_in(folder.path) == 1);
}

TEST_CASE("what NFS keeps of files that somebody reads is in nobody's way") {
  const TemporaryFolder folder;
  const std::string path = folder.at("ck");
  save(path, "first", true);
  fs::create_directories(path + ".saving");
  std::ofstream(path + ".saving/.nfs0001") << "read";
  save(path, "second", true);
  save(path, "third", true);
  CHECK(save_in(path) == "third");
}

}  // namespace trireme::checkpoint_folder_test

#include <trireme/comm/meeting_place.h>

#include <trireme/common/error.h>
#include <trireme/common/interruption.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kFirstPause{50};
constexpr microseconds kLongestPause{10'000};
// The first two have the values of c10d/c10d_wait.h.
constexpr milliseconds kFirstLook{1000};
constexpr milliseconds kNextLook{250};
constexpr milliseconds kLastWords{200};

// Sleeps longer from one call to the next.
void pause(microseconds& next) {
  std::this_thread::sleep_for(next);
  next = std::min(2 * next, kLongestPause);
}

}  // namespace

MeetingPlace::MeetingPlace(std::shared_ptr<GroupHealth> health) : health_(std::move(health)) {
  if (health_ && !health_->board.has_store()) health_.reset();
  if (health_) number_ = health_->board.count("meeting places");
}

std::string MeetingPlace::key(const std::string& topic, int64_t rank) const {
  return "trireme/meeting/" + std::to_string(number_) + "/" + topic + "/" + std::to_string(rank);
}

std::vector<int64_t> MeetingPlace::meet(int64_t number, const std::string& what) {
  if (!health_) return {number};
  const RankOf where = health_->where;
  FaultBoard& board = health_->board;
  health_->check_usable(what);
  const int64_t meeting = progress_->start();
  const std::string topic = std::to_string(meeting);
  board.post(key(topic, where.rank), std::to_string(number));
  // Ranks that come to this meeting have come to the last one, and so have left the one before.
  board.withdraw(key(std::to_string(meeting - 2), where.rank));
  WaitInProgress wait(*progress_, meeting);
  const auto deadline = Clock::now() + board.timeout();
  auto look = Clock::now() + kFirstLook;
  microseconds next = kFirstPause;
  std::vector<int64_t> numbers;
  while (static_cast<int64_t>(numbers.size()) < where.world) {
    const auto rank = static_cast<int64_t>(numbers.size());
    if (const auto brought = board.posted(key(topic, rank))) {
      numbers.push_back(std::stoll(*brought));
      continue;
    }
    pause(next);
    if (Clock::now() < look) continue;
    look += kNextLook;
    wait.takes_long(what);
    check_interruption();
    const auto announced = board.announced();
    const bool is_over = Clock::now() >= deadline;
    if (announced)
      refuse(what + " was given up because a peer announced: " + *announced);
    else if (const auto why = health_->waits_in_vain())
      refuse_in_words(*why);
    else if (board.has_gone(rank))
      refuse_without(rank, what);
    else if (is_over)
      refuse(what + " was waited for in vain: rank " + std::to_string(rank) + " has not come");
  }
  return numbers;
}

void MeetingPlace::refuse_without(int64_t rank, const std::string& what) {
  const FaultBoard::Others others = health_->board.ask_others(what, kLastWords);
  refuse_in_words(error_text(
      "comm",
      what + " was waited for in vain: rank " + std::to_string(rank) + " has gone. " + others.text,
      health_->where,
      (others.all_left_normally ? kFewerBatches : "") + std::string(kRebuildGroup)));
}

void MeetingPlace::refuse(const std::string& what) {
  refuse_in_words(error_text("comm", what, health_->where, kRebuildGroup));
}

void MeetingPlace::refuse_in_words(const std::string& text) {
  if (!health_->board.announced()) health_->board.announce(text);
  health_->set_failure(text);
  C10_THROW_ERROR(DistBackendError, text);
}

std::vector<std::string> MeetingPlace::exchange(const std::string& words, milliseconds patience) {
  if (!health_) return {};
  const RankOf where = health_->where;
  health_->board.post(key("all", where.rank), words);
  std::vector<std::string> all(static_cast<size_t>(where.world));
  const auto deadline = Clock::now() + patience;
  microseconds next = kFirstPause;
  for (int64_t rank = 0; rank < where.world; ++rank) {
    std::optional<std::string> said;
    while (!(said = health_->board.posted(key("all", rank))) && Clock::now() < deadline)
      pause(next);
    all[static_cast<size_t>(rank)] = said.value_or("");
  }
  return all;
}

}  // namespace trireme

#include <trireme/comm/crossed_waits.h>

#include <algorithm>
#include <sstream>
#include <utility>

// See [Note: crossed waits] in crossed_waits.h.

namespace trireme {
namespace {

// Many ranks that wait for a slow one must not keep the Store busy: each reads the words of a few
// others, and then of the next few.
constexpr size_t kWindow = 8;
constexpr int64_t kLooksPerWindow = 3;

}  // namespace

CrossedWaits::CrossedWaits(std::shared_ptr<GroupHealth> meeting_place)
    : board_(std::move(meeting_place)) {
  if (board_ && !board_->board.has_store()) board_.reset();
  if (board_) number_ = board_->board.count("crossed waits");
}

void CrossedWaits::add(std::shared_ptr<const Progress> progress) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(progress_.begin(), progress_.end(), progress) == progress_.end())
    progress_.push_back(std::move(progress));
}

std::string CrossedWaits::key(int64_t rank) const {
  return "trireme/waits/" + std::to_string(number_) + "/" + std::to_string(rank);
}

std::string CrossedWaits::Said::text() const {
  std::ostringstream text;
  text << beat << ' ' << place << ' ' << stuck.number << ' ' << started.size();
  for (const int64_t number : started) text << ' ' << number;
  text << ' ' << stuck.what;
  return text.str();
}

std::optional<CrossedWaits::Said> CrossedWaits::Said::read(const std::string& text) {
  std::istringstream stream(text);
  Said said;
  size_t count = 0;
  if (!(stream >> said.beat >> said.place >> said.stuck.number >> count)) return std::nullopt;
  for (int64_t number = 0; said.started.size() < count && stream >> number;)
    said.started.push_back(number);
  if (!std::getline(stream >> std::ws, said.stuck.what)) return std::nullopt;
  return said;
}

std::optional<CrossedWaits::Said> CrossedWaits::own_words() {
  Said said;
  bool is_stuck = false;
  for (size_t place = 0; place < progress_.size(); ++place) {
    said.started.push_back(progress_[place]->started());
    const std::optional<Progress::Stuck> stuck = progress_[place]->stuck();
    if (!stuck || is_stuck) continue;
    is_stuck = true;
    said.place = place;
    said.stuck = *stuck;
  }
  if (!is_stuck) return std::nullopt;
  said.beat = ++beat_;
  return said;
}

std::optional<std::string> CrossedWaits::look() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!board_) return std::nullopt;
  const std::optional<Said> own = own_words();
  if (!own) return std::nullopt;
  if (!said_ || !said_->is_like(*own)) read_.assign(static_cast<size_t>(board_->where.world), {});
  said_ = own;
  board_->board.post(key(board_->where.rank), own->text());
  const size_t first = static_cast<size_t>(looks_++ / kLooksPerWindow) * kWindow;
  for (size_t i = 0; i < std::min(kWindow, read_.size()); ++i) {
    const size_t rank = (first + i) % read_.size();
    if (static_cast<int64_t>(rank) == board_->where.rank) continue;
    const auto text = board_->board.posted(key(static_cast<int64_t>(rank)));
    const std::optional<Said> theirs = text ? Said::read(*text) : std::nullopt;
    if (!theirs || theirs->started.size() != own->started.size()) continue;
    const std::optional<Said> before = std::exchange(read_[rank], theirs);
    if (!before || before->beat == theirs->beat || !before->is_like(*theirs)) continue;
    if (theirs->started[own->place] >= own->stuck.number) continue;
    if (own->started[theirs->place] >= theirs->stuck.number) continue;
    const std::string here = "rank " + std::to_string(board_->where.rank);
    const std::string there = "rank " + std::to_string(rank);
    return here + " waits for " + own->stuck.what + ", to which " + there + " has not come, and " +
           there + " waits for " + theirs->stuck.what + ", to which " + here + " has not come";
  }
  return std::nullopt;
}

}  // namespace trireme

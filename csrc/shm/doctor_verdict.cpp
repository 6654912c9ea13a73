// The doctor's verdict on a group: which ranks hold up which.

#include <trireme/shm/doctor.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iterator>
#include <utility>

namespace trireme::shm {
namespace {

using Ranks = std::vector<const SeenRank*>;

Ranks those(const SeenGroup& group, const std::function<bool(const SeenRank&)>& are) {
  Ranks found;
  for (const SeenRank& rank : group.ranks)
    if (are(rank)) found.push_back(&rank);
  return found;
}

bool is_gone(const SeenRank& rank) { return rank.process == "gone"; }

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 100 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

// Returns "rank 1 (process 7, stopped, in step 10)".
std::string full_name(const SeenRank& rank) {
  return "rank " + std::to_string(rank.rank) + " (process " + std::to_string(rank.pid) + ", " +
         rank.process + (rank.step.empty() ? "" : ", " + rank.step) + ")";
}

// Returns "rank 0", "ranks 0, 2".
std::string numbers(const Ranks& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const SeenRank* rank : ranks)
    text += (rank == ranks.front() ? "" : ", ") + std::to_string(rank->rank);
  return text;
}

std::string verb(const Ranks& ranks, const char* one, const char* many) {
  return ranks.size() == 1 ? one : many;
}

std::string collective(const SeenOperation& operation) {
  return "collective " + std::to_string(operation.sequence) + ", " + operation.text;
}

// The furthest collective and the ranks in it.
struct Front {
  const SeenOperation* operation = nullptr;
  Ranks waiting;  // alive, not stopped, inside
  double waited_s = 0;
};

Front front_of(const SeenGroup& group) {
  Front front;
  for (const SeenRank& rank : group.ranks) {
    if (rank.sequence() > (front.operation != nullptr ? front.operation->sequence : 0))
      front.operation = &rank.operations.front();
  }
  if (front.operation == nullptr) return front;
  front.waiting = those(group, [&](const SeenRank& rank) {
    return rank.is_inside() && rank.sequence() == front.operation->sequence && !is_gone(rank) &&
           rank.process != "stopped" && rank.state == RankState::kHere;
  });
  for (const SeenRank* rank : front.waiting)
    front.waited_s = std::max(front.waited_s, rank->operations.front().started_s_ago);
  return front;
}

// Returns "has not entered collective 12, ...", "is inside ...", "has finished ...": where a rank
// is, compared with the furthest.
std::string place(const SeenRank& rank, const Front& front) {
  if (front.operation == nullptr) return "has not begun a collective";
  if (rank.sequence() == front.operation->sequence) {
    const SeenOperation& own = rank.operations.front();
    return (rank.is_inside() ? "is inside " : "has finished ") + collective(own);
  }
  std::string text = "has not entered " + collective(*front.operation);
  if (rank.is_inside()) text += " (it is inside " + collective(rank.operations.front()) + ")";
  return text;
}

// Returns "; ranks 0, 2 wait in it for 3.2 s".
std::string waiting_text(const Front& front, const Ranks& culprits) {
  Ranks others;
  std::copy_if(front.waiting.begin(), front.waiting.end(), std::back_inserter(others),
               [&](const SeenRank* rank) {
                 return std::find(culprits.begin(), culprits.end(), rank) == culprits.end();
               });
  if (others.empty()) return {};
  return "; " + numbers(others) + verb(others, " waits", " wait") + " in it for " +
         seconds_text(front.waited_s);
}

std::string each(const Ranks& ranks, const Front& front) {
  std::string text;
  for (const SeenRank* rank : ranks) {
    text += (text.empty() ? "" : "; ") + full_name(*rank);
    text += (is_gone(*rank) ? " has died: it " : " ") + place(*rank, front);
  }
  return text + waiting_text(front, ranks);
}

// Returns which ranks wait beside the collectives for at least that long, and which do not: "rank 0
// waits for all_reduce of bucket 3 for 7.2 s; rank 1 (process 7, sleeping) does not".
std::string contexts(const SeenGroup& group, double at_least_s) {
  const Ranks waiting = those(group, [&](const SeenRank& rank) {
    return !rank.context.empty() && rank.wait_s >= at_least_s && !is_gone(rank);
  });
  if (waiting.empty()) return {};
  std::string text;
  for (const SeenRank* rank : waiting) {
    text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(rank->rank)) + " waits for " +
            rank->context + " for " + seconds_text(rank->wait_s);
  }
  for (const SeenRank* rank :
       those(group, [](const SeenRank& rank) { return rank.context.empty(); }))
    text += "; " + full_name(*rank) + " does not";
  return text;
}

std::string failures(const Ranks& failed) {
  std::string text = "rank " + std::to_string(failed.front()->rank) + " (process " +
                     std::to_string(failed.front()->pid) + ") says: " + failed.front()->failure;
  const Ranks others(failed.begin() + 1, failed.end());
  if (!others.empty()) text += "; " + numbers(others) + verb(others, " has", " have") + " failed";
  return text;
}

// Returns the surest sign of trouble, and adds the ranks that cause it; empty if there is none.
std::string complaint(const SeenGroup& group, const Front& front, double patience_s,
                      Ranks& causes) {
  const Ranks lost = those(group, [](const SeenRank& rank) {
    const bool said_so = rank.state == RankState::kLeft || rank.state == RankState::kFailed;
    return rank.process == "stopped" || (is_gone(rank) && !said_so);
  });
  const Ranks failed =
      those(group, [](const SeenRank& rank) { return rank.state == RankState::kFailed; });
  if (!lost.empty()) {
    causes = lost;
    const std::string beside = contexts(group, 0);
    return each(lost, front) + (beside.empty() ? std::string() : "; " + beside) +
           (failed.empty() ? std::string() : "; " + failures(failed));
  }
  if (!failed.empty()) return failures(failed);
  if (front.waiting.empty() || front.waited_s < patience_s) {
    std::string text = contexts(group, patience_s);
    if (!text.empty())
      causes = those(group, [](const SeenRank& rank) { return rank.context.empty(); });
    return text;
  }
  const Ranks late = those(group, [&](const SeenRank& rank) {
    return rank.sequence() < front.operation->sequence && rank.state != RankState::kLeft;
  });
  if (!late.empty()) {
    causes = late;
    std::string text = each(late, front);
    for (const SeenRank* rank : late)
      if (!rank->abandoned.empty())
        text += "; rank " + std::to_string(rank->rank) + " left its work: " + rank->abandoned;
    return text;
  }
  const auto slowest = std::min_element(
      front.waiting.begin(), front.waiting.end(),
      [](const SeenRank* a, const SeenRank* b) { return a->arrived < b->arrived; });
  causes = {*slowest};
  return numbers(front.waiting) + verb(front.waiting, " is", " are") + " inside " +
         collective(*front.operation) + " for " + seconds_text(front.waited_s) + "; " +
         full_name(**slowest) + " has contributed least";
}

std::string all_is_well(const SeenGroup& group, const Front& front) {
  const SeenRank& first = group.ranks.front();
  const Ranks here = those(group, [](const SeenRank& rank) {
    return rank.state == RankState::kHere || rank.state == RankState::kJoining;
  });
  const Ranks left =
      those(group, [](const SeenRank& rank) { return rank.state == RankState::kLeft; });
  if (first.group == Nonce{}) {
    return numbers(here) + " of " + std::to_string(first.world) + verb(here, " has", " have") +
           " come to the start of the group";
  }
  std::string text = left.empty() ? "" : numbers(left) + verb(left, " has", " have") + " left; ";
  if (front.operation == nullptr) return text + "no collective has begun";
  if (!front.waiting.empty()) {
    return text + numbers(front.waiting) + verb(front.waiting, " is", " are") + " inside " +
           collective(*front.operation) + ", for " + seconds_text(front.waited_s);
  }
  return text + "nobody is inside a collective; the last was " + collective(*front.operation);
}

}  // namespace

void judge(SeenGroup& group, std::chrono::milliseconds patience) {
  const Front front = front_of(group);
  for (SeenRank& rank : group.ranks)
    rank.behind = front.operation != nullptr ? front.operation->sequence - rank.sequence() : 0;
  Ranks causes;
  group.verdict = complaint(group, front, static_cast<double>(patience.count()) / 1000, causes);
  for (const SeenRank* cause : causes)
    if (!is_gone(*cause) && cause->state != RankState::kLeft) group.suspects.push_back(cause->pid);
  const auto seen = static_cast<int64_t>(group.ranks.size());
  const int64_t members = group.ranks.front().members;
  group.is_well = group.verdict.empty() && seen >= members;
  if (group.verdict.empty()) group.verdict = all_is_well(group, front);
  if (seen < members) {
    group.verdict += "; of " + std::to_string(members) + " ranks on this host " +
                     std::to_string(members - seen) + " cannot be read";
  }
}

}  // namespace trireme::shm

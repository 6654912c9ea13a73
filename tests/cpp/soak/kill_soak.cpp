// Groups of ranks at random operations, of which some are killed or stopped at random times:
//
//   kill_soak --seconds 30 [--seed N]
//
// Checked in every round: the others raise within a bound and name a lost rank; who is continued in
// time is missed by nobody; results are right. Survivors go on to the next round, so that what a
// failure leaves behind in a process (descriptors, mappings, memory) adds up and is seen. At the
// end no process, no segment and no name in /dev/shm may be left.

#include <trireme/shm/doctor.h>

#include <array>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <iostream>
#include <optional>
#include <poll.h>
#include <set>
#include <soak/soak_worker.h>
#include <sstream>
#include <stdexcept>

namespace trireme::shm::test {
namespace {

using std::chrono::milliseconds;
constexpr int64_t kSlots = 4;
constexpr milliseconds kShort{600};    // deadline of operations, where a rank is stopped
constexpr milliseconds kLong{30'000};  // elsewhere: nobody may come near it
constexpr milliseconds kBound{5'000};  // for others to notice, on a busy machine
constexpr int64_t kWarmUp = 10;
#ifdef __SANITIZE_ADDRESS__  // it keeps what was freed, and what it knows of it
constexpr int64_t kGrowthKib = 128 * 1024;
#else
constexpr int64_t kGrowthKib = 16 * 1024;  // a process's, after the rounds of its warm-up
#endif

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// --- A rank's process ----------------------------------------------------------------------------

void say(int fd, std::string line) {
  for (char& letter : line) letter = letter == '\n' ? ' ' : letter;
  line += '\n';
  if (::write(fd, line.data(), line.size()) < 0) ::_exit(3);
}

std::string outcome_of(const Round& round, const std::string& folder, int answers) {
  FolderExchange exchange(folder);
  try {
    const auto group = HostGroup::join(exchange, {{round.rank, round.world}, round.timeout});
    Collectives collectives(*group);
    ShmRank self{round.rank, *group, collectives};
    RandomRank rank(self, round);
    say(answers, "joined");
    rank.run();
  } catch (const Fault& fault) {
    return std::string("fault ") + fault.what();
  } catch (const std::exception& error) {
    return std::string("error ") + error.what();
  }
  return "fine";
}

// Obeys one line per round until there are no more.
int rank_main(int commands, int answers) {
  FILE* lines = ::fdopen(commands, "r");
  char line[512];
  while (::fgets(line, sizeof(line), lines) != nullptr) {
    std::istringstream words(line);
    Round round;
    int64_t timeout_ms = 0;
    std::string folder;
    words >> round.number >> round.world >> round.rank >> round.seed >> round.operations >>
        timeout_ms >> folder;
    round.timeout = milliseconds(timeout_ms);
    const std::string outcome = outcome_of(round, folder, answers);
    const Holdings holds = Holdings::of_this_process();
    say(answers, std::to_string(holds.descriptors) + " " + std::to_string(holds.segments) + " " +
                     std::to_string(holds.resident_kib) + " " + outcome);
  }
  ::fclose(lines);
  return 0;
}

// --- Who starts, ends and checks them ------------------------------------------------------------

struct Worker {
  pid_t pid = 0;
  int commands = -1;
  int answers = -1;
  std::string unread{};
  int64_t rounds = 0;
  Holdings most{};  // after its first rounds
};

enum class Harm : uint8_t { kNone, kKill, kStop, kPause };

struct Plan {
  int64_t world;
  Harm harm;
  std::vector<int64_t> victims;
  milliseconds delay;
};

class Soak {
 public:
  explicit Soak(uint64_t seed) : draw_(seed), names_before_(names()) {
    char name[] = "/tmp/trireme_soak_XXXXXX";
    folder_ = ::mkdtemp(name);
    for (Worker& worker : workers_) start(worker);
  }
  ~Soak() {
    for (Worker& worker : workers_) {
      if (worker.pid <= 0) continue;
      ::kill(worker.pid, SIGKILL);
      ::waitpid(worker.pid, nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }
  Soak(const Soak&) = delete;
  Soak& operator=(const Soak&) = delete;

  void run_round() {
    const Plan plan = make_plan();
    ++round_;
    try {
      begin(plan);
      ::usleep(static_cast<useconds_t>(plan.delay.count() * 1000));
      harm(plan);
      check(plan);
    } catch (const std::exception& error) {
      fail(describe(plan) + ": " + error.what());
    }
    std::filesystem::remove_all(folder_ + "/" + std::to_string(round_));
    ++count_[static_cast<size_t>(plan.harm)];
  }

  // Everybody ends by itself, and nothing is left.
  void end() {
    for (Worker& worker : workers_) {
      ::close(std::exchange(worker.commands, -1));
      int status = -1;
      ::waitpid(worker.pid, &status, 0);
      if (status != 0) fail("process " + std::to_string(worker.pid) + " ended badly");
      ever_.insert(std::exchange(worker.pid, 0));
      ::close(worker.answers);
    }
    for (const FoundSegment& segment : scan_segments(sizeof(RankBlock)).segments) {
      const auto rank = read_block(segment.bytes, 0, 1);
      if (rank && ever_.count(rank->pid) > 0)
        fail("a segment of process " + std::to_string(rank->pid) + " is left");
    }
    std::set<std::string> left = names();
    for (int i = 0; i < 10 && !left.empty(); ++i) {  // other programs may be at their start
      std::set<std::string> still;
      for (const std::string& name : names())
        if (left.count(name) > 0 && names_before_.count(name) == 0) still.insert(name);
      left = std::move(still);
      if (!left.empty()) ::usleep(200'000);
    }
    if (!left.empty()) fail("/dev/shm/" + *left.begin() + " is left");
  }

  std::string summary() const {
    std::ostringstream text;
    text << round_ << " rounds: " << count_[0] << " undisturbed, " << count_[1] << " with kills, "
         << count_[2] << " with a stop, " << count_[3] << " with a pause; the others raised after "
         << "at most " << slowest_kill_.count() << " ms (kill), " << slowest_stop_.count()
         << " ms (stop, with a deadline of " << kShort.count() << " ms)";
    return text.str();
  }

 private:
  uint64_t below(uint64_t limit) { return draw_() % limit; }

  static std::set<std::string> names() {
    std::set<std::string> found;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored))
      if (entry.path().filename().native().starts_with("trireme-"))
        found.insert(entry.path().filename());
    return found;
  }

  Plan make_plan() {
    Plan plan{static_cast<int64_t>(2 + below(kSlots - 1)), Harm::kNone, {}, milliseconds(0)};
    const uint64_t dice = below(10);
    plan.harm = dice < 1   ? Harm::kNone
                : dice < 7 ? Harm::kKill
                : dice < 8 ? Harm::kStop
                           : Harm::kPause;
    if (plan.harm == Harm::kNone) return plan;
    std::vector<int64_t> ranks(static_cast<size_t>(plan.world));
    std::iota(ranks.begin(), ranks.end(), 0);
    std::shuffle(ranks.begin(), ranks.end(), draw_);
    const bool two = plan.harm == Harm::kKill && plan.world > 2 && below(4) == 0;
    plan.victims.assign(ranks.begin(), ranks.begin() + (two ? 2 : 1));
    plan.delay = milliseconds(below(40));
    return plan;
  }

  std::string describe(const Plan& plan) const {
    constexpr std::array kHarms{"nothing", "kill", "stop", "pause"};
    std::string text = "round " + std::to_string(round_) + ", " + std::to_string(plan.world) +
                       " ranks, " + kHarms[static_cast<size_t>(plan.harm)];
    for (const int64_t victim : plan.victims) text += " " + std::to_string(victim);
    return text + " after " + std::to_string(plan.delay.count()) + " ms";
  }

  Worker& worker(int64_t rank) { return workers_[static_cast<size_t>(rank)]; }

  void start(Worker& worker) {
    if (worker.commands >= 0) ::close(worker.commands);
    if (worker.answers >= 0) ::close(worker.answers);
    worker = {};
    std::array<int, 2> commands{};
    std::array<int, 2> answers{};
    if (::pipe2(commands.data(), O_CLOEXEC) != 0 || ::pipe2(answers.data(), O_CLOEXEC) != 0)
      fail("no pipe");
    worker.pid = ::fork();
    if (worker.pid == 0) {
      // The ends of the others would keep these from seeing the end of their commands.
      for (const Worker& other : workers_) {
        if (other.commands >= 0) ::close(other.commands);
        if (other.answers >= 0) ::close(other.answers);
      }
      ::close(commands[1]);
      ::close(answers[0]);
      std::exit(rank_main(commands[0], answers[1]));
    }
    ::close(commands[0]);
    ::close(answers[1]);
    worker.commands = commands[1];
    worker.answers = answers[0];
  }

  void begin(const Plan& plan) {
    const bool is_endless = plan.harm == Harm::kKill || plan.harm == Harm::kStop;
    const milliseconds timeout = plan.harm == Harm::kStop ? kShort : kLong;
    const std::string folder = folder_ + "/" + std::to_string(round_);
    std::filesystem::create_directory(folder);
    const uint64_t seed = draw_();
    for (int64_t rank = 0; rank < plan.world; ++rank) {
      std::ostringstream line;
      line << round_ << ' ' << plan.world << ' ' << rank << ' ' << seed << ' '
           << (is_endless ? 0 : 60) << ' ' << timeout.count() << ' ' << folder;
      say(worker(rank).commands, line.str());
    }
    for (int64_t rank = 0; rank < plan.world; ++rank) {
      const auto line = answer_of(rank, kLong);
      if (line != "joined") fail("rank " + std::to_string(rank) + " said " + line);
    }
  }

  void harm(const Plan& plan) {
    for (const int64_t victim : plan.victims)
      ::kill(worker(victim).pid, plan.harm == Harm::kKill ? SIGKILL : SIGSTOP);
    if (plan.harm == Harm::kPause) {
      ::usleep(static_cast<useconds_t>(below(150) * 1000));
      for (const int64_t victim : plan.victims) ::kill(worker(victim).pid, SIGCONT);
    }
    harmed_at_ = Clock::now();
  }

  void check(const Plan& plan) {
    const auto is_victim = [&](int64_t rank) {
      return std::find(plan.victims.begin(), plan.victims.end(), rank) != plan.victims.end();
    };
    const bool must_raise = plan.harm == Harm::kKill || plan.harm == Harm::kStop;
    const milliseconds patience = plan.harm == Harm::kKill   ? kBound
                                  : plan.harm == Harm::kStop ? kShort + kBound
                                                             : kLong;
    for (int64_t rank = 0; rank < plan.world; ++rank) {
      if (must_raise && is_victim(rank)) continue;
      const std::string outcome = outcome_of(rank, harmed_at_ + patience);
      if (must_raise) {
        check_names_a_victim(plan, rank, outcome);
      } else if (outcome != "fine") {
        fail("rank " + std::to_string(rank) + " said " + outcome);
      }
    }
    const auto took = std::chrono::duration_cast<milliseconds>(Clock::now() - harmed_at_);
    if (plan.harm == Harm::kKill) slowest_kill_ = std::max(slowest_kill_, took);
    if (plan.harm == Harm::kStop) slowest_stop_ = std::max(slowest_stop_, took);
    for (const int64_t victim : plan.victims) {
      if (plan.harm == Harm::kStop) {
        ::kill(worker(victim).pid, SIGCONT);
        const std::string outcome = outcome_of(victim, Clock::now() + kBound);
        if (!outcome.starts_with("fault ")) fail("the continued rank said " + outcome);
      } else if (plan.harm == Harm::kKill) {
        ::waitpid(worker(victim).pid, nullptr, 0);
        ever_.insert(worker(victim).pid);
        start(worker(victim));
      }
    }
  }

  void check_names_a_victim(const Plan& plan, int64_t rank, const std::string& outcome) {
    const char* deed = plan.harm == Harm::kKill ? ") has died" : "stopped";
    for (const int64_t victim : plan.victims) {
      const std::string name = "rank " + std::to_string(victim) + " (process " +
                               std::to_string(worker(victim).pid) + ")";
      if (outcome.starts_with("fault ") && contains(outcome, name) && contains(outcome, deed))
        return;
    }
    fail("rank " + std::to_string(rank) + " does not name who is lost: " + outcome);
  }

  // What a rank says of a round, without what it holds, which is checked.
  std::string outcome_of(int64_t rank, Clock::time_point until) {
    const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now());
    const std::string line = answer_of(rank, std::max(left, milliseconds(0)));
    Worker& own = worker(rank);
    std::istringstream words(line);
    Holdings holds;
    words >> holds.descriptors >> holds.segments >> holds.resident_kib;
    std::string outcome;
    std::getline(words >> std::ws, outcome);
    if (holds.segments != 0) fail("rank " + std::to_string(rank) + " still maps segments");
    if (++own.rounds <= kWarmUp) {
      if (own.rounds > 1 && holds.descriptors > own.most.descriptors)
        fail("rank " + std::to_string(rank) + " holds more descriptors than before");
      own.most.descriptors = holds.descriptors;
      own.most.resident_kib = std::max(own.most.resident_kib, holds.resident_kib);
    } else if (holds.descriptors > own.most.descriptors ||
               holds.resident_kib > own.most.resident_kib + kGrowthKib) {
      fail("rank " + std::to_string(rank) + " held " + std::to_string(own.most.resident_kib) +
           " KiB in its first rounds and grew to " + line);
    }
    return outcome;
  }

  // The next line that a rank says.
  std::string answer_of(int64_t rank, milliseconds patience) {
    Worker& own = worker(rank);
    const auto deadline = Clock::now() + patience;
    for (;;) {
      const size_t end = own.unread.find('\n');
      if (end != std::string::npos) {
        const std::string line = own.unread.substr(0, end);
        own.unread.erase(0, end + 1);
        return line;
      }
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      pollfd watch{own.answers, POLLIN, 0};
      const int ready = ::poll(&watch, 1, std::max<int>(0, static_cast<int>(left.count())));
      if (ready <= 0) {
        std::string said = "rank " + std::to_string(rank) + " did not answer within " +
                           std::to_string(patience.count()) + " ms";
        for (const SeenGroup& group : examine_host({.pids = {own.pid}}).groups)
          said += "; the doctor says: " + group.verdict;
        fail(said);
      }
      char part[4096];
      const ssize_t got = ::read(own.answers, part, sizeof(part));
      if (got <= 0) fail("rank " + std::to_string(rank) + " ended unasked");
      own.unread.append(part, static_cast<size_t>(got));
    }
  }

  std::mt19937_64 draw_;
  std::set<std::string> names_before_;
  std::string folder_;
  std::array<Worker, kSlots> workers_;
  std::set<pid_t> ever_;
  int64_t round_ = 0;
  std::array<int64_t, 4> count_{};
  Clock::time_point harmed_at_;
  milliseconds slowest_kill_{0};
  milliseconds slowest_stop_{0};
};

}  // namespace
}  // namespace trireme::shm::test

int main(int argc, char** argv) {
  using namespace trireme::shm::test;
  int64_t seconds = 30;
  uint64_t seed = std::random_device{}();
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--seconds") seconds = std::atoll(argv[i + 1]);
    if (name == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  std::cout << "[kill_soak] seed " << seed << std::endl;
  const auto until = trireme::shm::Clock::now() + std::chrono::seconds(seconds);
  ::signal(SIGPIPE, SIG_IGN);
  try {
    Soak soak(seed);
    while (trireme::shm::Clock::now() < until) soak.run_round();
    soak.end();
    std::cout << "[kill_soak] " << soak.summary() << std::endl;
  } catch (const std::exception& error) {
    std::cout << "[kill_soak] FAILED: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}

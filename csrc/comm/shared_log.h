#pragma once

#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// [Note: one order in shared memory]
//
// A rank appends a text by taking the next number of the log, writing the slot of that number and
// then the number itself into it. Every rank reads the slots in the order of their numbers, so all
// see all texts in one order, and no rank hands out that order. A slot is written again when all
// ranks have read it. Long texts take several slots, those of other ranks perhaps in between.
//
// Nobody is woken who need not be: a rank says which of its threads wants what others append. A
// rank stores that before it looks for the last time, and others load it after they have appended,
// all sequentially consistent: so one of the two sees the other.

// The texts that the ranks of a host append, read by all in one order. One thread at a time, except
// for wait functions and wake(), which any thread may call.
class TRIREME_API SharedLog {
 public:
  // Collective over the ranks of the communicator. Returns null on all of them where they share no
  // memory. Takes 512 KiB for all ranks together, 8 MiB at most.
  static std::unique_ptr<SharedLog> make(Communicator& communicator);

  // Appends a text, or keeps it until post() finds room.
  void append(std::string_view text);
  // Appends what was kept; returns whether any slot was written.
  bool post();
  bool has_unposted() const { return !unposted_.empty(); }

  struct Entry {
    int64_t from = 0;
    std::string text = {};
  };
  // Returns the next text; nothing if there is none yet.
  std::optional<Entry> take();

  // The threads of a rank that others may wake. kWaiting is in a call that waits for something of
  // the log; kBeside runs what comes while nobody waits.
  enum class Reader : uint32_t { kNone, kWaiting, kBeside };
  // Says whom others wake when they have appended. The caller looks once more afterwards.
  void set_reader(Reader reader);
  // Wakes the readers of the other ranks; `all`: also threads beside that are not set.
  void wake_others(bool all);
  // Wakes both threads of this rank.
  void wake();
  shm::Futex& futex_of(Reader reader);

 private:
  struct Line;
  struct Slot;
  SharedLog(std::shared_ptr<const shm::Segment> memory, RankOf where, uint64_t slots);

  bool try_put(std::string_view text, bool is_last);
  uint64_t slowest() const;
  Line& line(int64_t rank) const;
  Slot& slot(uint64_t number) const;
  static int64_t bytes_for(int64_t world, uint64_t slots);

  std::shared_ptr<const shm::Segment> memory_;
  RankOf where_;
  uint64_t slots_;
  uint64_t read_ = 0;
  uint64_t known_slowest_ = 0;
  struct Part {
    std::string text;
    bool is_last;
  };
  std::deque<Part> unposted_;
  std::vector<std::string> begun_;  // by rank: the first parts of a long text
};

}  // namespace trireme

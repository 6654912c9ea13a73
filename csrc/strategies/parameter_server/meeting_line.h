#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace trireme::ps {

// How far one worker is in the meetings of one kind; see worker_meeting.h. Lies in memory that all
// workers map; zeros at first.
struct MeetingLine {
  std::atomic<uint64_t> phases;  // 3 per meeting
  std::atomic<uint64_t> failed;  // the last meeting that it made fail, counted from 1
  // The worker's clock at the last two meetings, by parity: it may begin the next meeting before
  // others have read this one's.
  std::array<std::atomic<uint64_t>, 2> clock;
};

}  // namespace trireme::ps

#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>

#include <functional>
#include <string>

namespace trireme {

// What the ranks of an elastic run compare, for messages.
struct ComparedOnRanks {
  std::string label;      // "plans of an elastic run"
  std::string got;        // "ranks with other plans": "got ..., '<line>' on rank 0, ..."
  std::string next_step;  // "Call end_epoch() alike on all ranks."
};

// Compares what `say` returns on all ranks; `ranks` is null for one process. Collective: one gather
// of a number where all is well. Throws on all ranks: what `say` threw here, or ValueError that
// names the rank that could not say it, or how ranks differ.
TRIREME_API void agree_on_ranks(const ComparedOnRanks& compared,
                                const std::function<std::string()>& say, Communicator* ranks);

// Runs `work` on every rank. Throws on all of them where it threw on one: its own exception there,
// elsewhere an error that names the rank and what it could not do: "got <what>, which rank 2
// cannot: <its text>". Collective: one gather of texts.
TRIREME_API void work_on_ranks(const std::string& what, const std::string& next_step,
                               const std::function<void()>& work, Communicator* ranks);

// Throws ValueError of area "pipetransformer".
[[noreturn]] TRIREME_API void refuse_elastic(const std::string& got, const Communicator* ranks,
                                             const std::string& next_step);

}  // namespace trireme

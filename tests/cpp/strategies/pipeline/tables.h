#pragma once

#include <trireme/strategies/pipeline/schedule_forms.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace trireme::test {

// Makes a form with its usual number of stages, or with another one.
inline PipelineSchedule make_form(std::string name, int64_t ranks, int64_t micro_batches,
                                  std::optional<int64_t> stages_per_rank = {}) {
  PipelineScheduleRequest request;
  request.name = std::move(name);
  request.ranks = ranks;
  request.micro_batches = micro_batches;
  request.stages_per_rank = stages_per_rank;
  return pipeline_schedule(request);
}

// Writes one row with a space between the actions.
inline std::string row_of(const PipelineSchedule& schedule, size_t rank) {
  std::string text;
  for (const PipelineAction& action : schedule.rows[rank]) {
    text += (text.empty() ? "" : " ") + to_string(action);
  }
  return text;
}

}  // namespace trireme::test

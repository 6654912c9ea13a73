#include <trireme/strategies/pipeline/schedule_text.h>

#include <trireme/strategies/pipeline/refuse.h>
#include <trireme/strategies/pipeline/schedule_check.h>
#include <trireme/strategies/pipeline/schedule_costs.h>
#include <trireme/strategies/pipeline/schedule_lowering.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

// Reads stages, micro-batches and the rank of each stage from the rows.
PipelineSchedule inferred(std::vector<RankActions> rows) {
  PipelineSchedule schedule;
  int64_t cells = 0;
  for (const RankActions& row : rows) {
    for (const PipelineAction& action : row) {
      for_each_part(action, [&](const PipelineAction& part) {
        ++cells;
        schedule.stages = std::max<int64_t>(schedule.stages, int64_t{part.stage} + 1);
        schedule.micro_batches =
            std::max<int64_t>(schedule.micro_batches, int64_t{part.micro_batch} + 1);
      });
    }
  }
  if (schedule.stages > cells || schedule.micro_batches > cells) {
    refuse_pipeline("got " + std::to_string(schedule.stages) + " stages and " +
                        std::to_string(schedule.micro_batches) + " micro-batches in a table of " +
                        std::to_string(cells) + " cells",
                    "Count stages and micro-batches from 0 on, and leave none out.");
  }
  schedule.ranks = static_cast<int64_t>(rows.size());
  schedule.stage_rank.assign(static_cast<size_t>(schedule.stages), -1);
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    for (const PipelineAction& action : rows[rank]) {
      for_each_part(action, [&](const PipelineAction& part) {
        if (part.stage < 0) return;
        int64_t& holder = schedule.stage_rank[static_cast<size_t>(part.stage)];
        if (holder < 0) holder = static_cast<int64_t>(rank);
      });
    }
  }
  const auto missing = std::find(schedule.stage_rank.begin(), schedule.stage_rank.end(), -1);
  if (missing != schedule.stage_rank.end()) {
    refuse_pipeline("got no action for stage " +
                        std::to_string(missing - schedule.stage_rank.begin()) + " of " +
                        std::to_string(schedule.stages),
                    "Count stages from 0 on, and leave none out.");
  }
  schedule.rows = std::move(rows);
  return schedule;
}

RankActions parse_row(std::string_view line, size_t row) {
  RankActions actions;
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  if (line.empty()) return actions;
  while (true) {
    const size_t comma = line.find(',');
    std::string_view cell = line.substr(0, comma);
    if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') {
      cell = cell.substr(1, cell.size() - 2);
    }
    actions.push_back(parse_action(cell, {row, actions.size() + 1}));
    if (comma == std::string_view::npos) return actions;
    line.remove_prefix(comma + 1);
  }
}

void write_row(std::string& text, const RankActions& row, TableForm form) {
  const size_t begin = text.size();
  size_t cells = 0;
  for (const PipelineAction& action : row) {
    const bool stays = form != TableForm::kComputeOnly || is_compute(action.kind) ||
                       action.kind == ActionKind::kBubble;
    if (!stays) continue;
    if (cells++ > 0) text += ',';
    text += to_string(action);
  }
  // An empty line is read as a row without cells: so a row of one bubble is written as "".
  if (cells == 1 && text.size() == begin) text += "\"\"";
  text += '\n';
}

void add_aligned(std::string& line, const std::string& cell, size_t width) {
  line.append(width + 1 - std::min(width, cell.size()), ' ').append(cell);
}

}  // namespace

PipelineSchedule schedule_from_rows(std::vector<RankActions> rows) {
  PipelineSchedule schedule = inferred(std::move(rows));
  check_schedule(schedule);
  return schedule;
}

PipelineSchedule schedule_from_csv(std::string_view text) {
  std::vector<RankActions> rows;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    rows.push_back(parse_row(text.substr(0, end), rows.size() + 1));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return schedule_from_rows(std::move(rows));
}

TableForm table_form(std::string_view name) {
  if (name == "compute_only") return TableForm::kComputeOnly;
  if (name == "compute_comms") return TableForm::kComputeComms;
  refuse_pipeline(
      "got the form '" + std::string(name) + "', expected \"compute_only\" or \"compute_comms\"",
      "Pass one of them.");
}

std::string to_csv(const PipelineSchedule& schedule, TableForm form) {
  std::string text;
  const PipelineSchedule written =
      form == TableForm::kComputeComms ? lower_schedule(schedule) : schedule;
  for (const RankActions& row : written.rows) write_row(text, row, form);
  return text;
}

std::string to_string(const PipelineSchedule& schedule) {
  const std::vector<TimedAction> timed = timeline(schedule);
  double last = 0;
  for (const TimedAction& action : timed) last = std::max(last, action.end);
  const auto steps = static_cast<size_t>(last);
  const auto ranks = static_cast<size_t>(schedule.ranks);
  std::vector<std::string> cells(ranks * steps, ".");
  size_t width = std::to_string(steps).size();
  for (const TimedAction& action : timed) {
    const size_t row = static_cast<size_t>(action.rank) * steps;
    const auto begin = static_cast<size_t>(action.begin);
    cells[row + begin] = to_string(action.action);
    width = std::max(width, cells[row + begin].size());
    for (auto step = begin + 1; step < static_cast<size_t>(action.end); ++step) {
      cells[row + step] = "-";
    }
  }
  const size_t label = std::to_string(ranks - 1).size();
  std::string text = "step " + std::string(label + 1, ' ');
  for (size_t step = 0; step < steps; ++step) add_aligned(text, std::to_string(step), width);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const std::string number = std::to_string(rank);
    text += "\nrank " + std::string(label - number.size(), ' ') + number + " ";
    for (size_t step = 0; step < steps; ++step) {
      add_aligned(text, cells[rank * steps + step], width);
    }
  }
  return text + "\n";
}

}  // namespace trireme

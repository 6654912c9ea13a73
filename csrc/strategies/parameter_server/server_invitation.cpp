#include <trireme/strategies/parameter_server/server_invitation.h>

#include <trireme/common/version.h>
#include <trireme/shm/liveness.h>
#include <trireme/strategies/parameter_server/table_memory.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <variant>

namespace trireme::ps {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kNextStep = "Pass the Store in which a server's accept() has left it.";

// Returns a text that is equal for builds with the same memory layout.
std::string layout() {
  return c10::str(kVersion, ", torch ", kTorchVersion, ", ", sizeof(BoardHeader), "/",
                  sizeof(WorkerLine), "/", sizeof(BlockLine), "/", sizeof(RowLine));
}

// Names the processes that may open each other's memory.
std::string host() { return shm::host_boot() + " " + shm::pid_namespace(); }

[[noreturn]] void refuse(const std::string& got, const char* next_step) {
  TORCH_CHECK_VALUE(false, error_text(kPsArea, "join: got " + got, {}, next_step));
}

template <typename T>
Json json_of(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

template <typename T>
std::optional<T> optional_of(const Json& json) {
  return json.is_null() ? std::nullopt : std::optional<T>(json.get<T>());
}

Json json_of(const RowInit& init) {
  const auto* normal = std::get_if<Normal>(&init);
  const auto* uniform = std::get_if<Uniform>(&init);
  return {init.index(), normal ? normal->std : uniform ? uniform->bound : 0};
}

RowInit init_of(const Json& json) {
  const auto number = json.at(1).get<double>();
  switch (json.at(0).get<int>()) {
    case 1:
      return Normal{number};
    case 2:
      return Uniform{number};
    default:
      return Zeros{};
  }
}

Json json_of(const RowShape& rows) {
  return {{"dim", rows.dim},
          {"init", json_of(rows.init)},
          {"seed", rows.seed},
          {"dtype", static_cast<int>(rows.dtype)},
          {"rows", json_of(rows.rows)}};
}

RowShape rows_of(const Json& json) {
  RowShape rows;
  rows.dim = json.at("dim").get<int64_t>();
  rows.init = init_of(json.at("init"));
  rows.seed = json.at("seed").get<uint64_t>();
  rows.dtype = static_cast<at::ScalarType>(json.at("dtype").get<int>());
  rows.rows = optional_of<int64_t>(json.at("rows"));
  return rows;
}

Json json_of(const TableSpec& table) {
  Json json = {{"name", table.name},
               {"module", table.is_module},
               {"optimizer", {name_of(table.optimizer), options_of(table.optimizer)}},
               {"mean", table.options.reduction == Reduction::kMean},
               {"staleness", json_of(table.options.staleness)},
               {"rows", table.rows ? json_of(*table.rows) : Json()},
               {"tensors", Json::array()}};
  for (size_t i = 0; i < table.tensors.size(); ++i)
    json["tensors"].push_back({table.names[i], static_cast<int>(table.tensors[i].scalar_type()),
                               table.tensors[i].sizes().vec()});
  return json;
}

TableSpec table_of(const Json& json) {
  TableSpec table;
  table.name = json.at("name").get<std::string>();
  table.has_module_elsewhere = json.at("module").get<bool>();
  const Json& optimizer = json.at("optimizer");
  const auto spec = optimizer_spec_of(optimizer.at(0).get<std::string>(),
                                      optimizer.at(1).get<std::vector<double>>());
  if (!spec) refuse("a table of an unknown optimizer", kNextStep);
  table.optimizer = *spec;
  table.options.reduction = json.at("mean").get<bool>() ? Reduction::kMean : Reduction::kSum;
  table.options.staleness = optional_of<int64_t>(json.at("staleness"));
  if (!json.at("rows").is_null()) table.rows = rows_of(json.at("rows"));
  for (const Json& tensor : json.at("tensors")) {
    table.names.push_back(tensor.at(0).get<std::string>());
    // Only the shape is needed: values lie in the table's memory.
    table.tensors.push_back(at::empty(
        tensor.at(2).get<std::vector<int64_t>>(),
        at::device(at::kMeta).dtype(static_cast<at::ScalarType>(tensor.at(1).get<int>()))));
  }
  return table;
}

Json json_of(const Options& options) {
  return {{"mode", static_cast<int>(options.mode)},
          {"staleness", options.staleness},
          {"backup", options.backup},
          {"timeout_ms", options.timeout ? Json(options.timeout->count()) : Json()},
          {"goes_on", options.on_worker_loss == WorkerLoss::kContinue}};
}

Options options_of(const Json& json) {
  Options options;
  options.mode = static_cast<Mode>(json.at("mode").get<int>());
  options.staleness = json.at("staleness").get<int64_t>();
  options.backup = json.at("backup").get<int64_t>();
  if (const auto ms = optional_of<int64_t>(json.at("timeout_ms")))
    options.timeout = std::chrono::milliseconds(*ms);
  if (json.at("goes_on").get<bool>()) options.on_worker_loss = WorkerLoss::kContinue;
  return options;
}

Invitation invitation_of_json(const Json& json) {
  const Json& board = json.at("board");
  BoardPlan lines{board.at(0).get<int64_t>(), board.at(1).get<int64_t>(),
                  board.at(2).get<int64_t>()};
  std::vector<TableSpec> tables;
  for (const Json& table : json.at("tables")) tables.push_back(table_of(table));
  return {ServerPlan(std::move(tables), options_of(json.at("options")), lines,
                     json.at("machine_bytes").get<int64_t>()),
          json.at("addresses").get<std::vector<std::string>>()};
}

}  // namespace

std::string to_text(const Invitation& invitation) {
  const ServerPlan& plan = invitation.plan;
  Json json = {{"layout", layout()},
               {"host", host()},
               {"options", json_of(plan.options)},
               {"board", {plan.board.workers, plan.board.most_workers, plan.board.servers}},
               {"machine_bytes", plan.machine_bytes},
               {"tables", Json::array()},
               {"addresses", invitation.addresses}};
  for (const auto& table : plan.specs) json["tables"].push_back(json_of(*table));
  return json.dump();
}

Invitation invitation_of(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    const auto layout = json.at("layout").get<std::string>();
    if (layout != ps::layout())
      refuse(c10::str("a server of Trireme ", layout, ", expected ", ps::layout()),
             "Join with the same build of Trireme.");
    if (json.at("host").get<std::string>() != host())
      refuse("a server on another host, expected one on this host",
             "Start the worker on the host of the server; between hosts nobody joins.");
    return invitation_of_json(json);
  } catch (const Json::exception& error) {
    refuse(c10::str("a text that no server has left (", error.what(), ")"), kNextStep);
  }
}

}  // namespace trireme::ps

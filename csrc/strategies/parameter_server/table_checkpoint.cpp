#include <trireme/strategies/parameter_server/table_checkpoint.h>

#include <trireme/saving/checkpoint.h>
#include <trireme/saving/checkpoint_reader.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

// See [Note: a server in a checkpoint] in table_checkpoint.h.

namespace trireme::ps {
namespace {

using Json = nlohmann::ordered_json;
using Places = std::vector<CheckpointTensor>;

constexpr const char* kServer = "parameter_server";

std::string prefix_of(const Table& table, const Tables& tables) {
  const auto dense = std::count_if(tables.begin(), tables.end(),
                                   [](const auto& other) { return !other->spec().rows; });
  return dense > 1 ? table.name() + "." : std::string();
}

// Returns the options without the learning rate: "Adam(beta1=0.9, ...)".
std::string options_but_lr(const OptimizerSpec& optimizer) {
  std::string text = to_string(optimizer);
  const size_t begin = text.find("lr=");
  if (begin == std::string::npos) return text;
  const size_t comma = text.find(", ", begin);
  const size_t end = comma == std::string::npos ? text.size() - 1 : comma + 2;
  return text.erase(begin, end - begin);
}

Json description_of(const Tables& tables) {
  Json all = Json::object();
  for (const auto& table : tables) {
    const TableSpec& spec = table->spec();
    Json& description = all[table->name()];
    description["kind"] = spec.rows ? "sparse" : "dense";
    if (spec.rows) description["rows"] = to_string(*spec.rows);
    description["optimizer"] = options_but_lr(spec.optimizer);
  }
  return all;
}

Places buffers_of(const Table& table, const Tables& tables) {
  Places places;
  for (const auto& [name, buffer] : table.spec().buffers)
    places.push_back({prefix_of(table, tables) + name,
                      buffer.scalar_type(),
                      buffer.sizes().vec(),
                      {buffer.detach()}});
  return places;
}

using ContentOf = std::function<CheckpointContent(const Table&, const std::string& prefix)>;

CheckpointContent content_of(const Tables& tables, const ContentOf& content_of_one) {
  CheckpointContent all;
  const auto append = [](Places& to, Places from) {
    std::move(from.begin(), from.end(), std::back_inserter(to));
  };
  for (const auto& table : tables) {
    CheckpointContent content = content_of_one(*table, prefix_of(*table, tables));
    for (auto& [kind, places] : content.tensors) append(all.tensors[kind], std::move(places));
    append(all.tensors[kModelTensors], buffers_of(*table, tables));
  }
  return all;
}

CheckpointContent places_of(const Tables& tables) {
  return content_of(
      tables, [](const Table& table, const std::string& prefix) { return table.places(prefix); });
}

CheckpointContent content_of_all(const Tables& tables, const std::vector<SharesByHost>& shares) {
  auto next = shares.begin();
  return content_of(tables, [&](const Table& table, const std::string& prefix) {
    return table.content(prefix, *next++);
  });
}

// Refuses a checkpoint of other tables.
void check_description(const std::string& text, const Tables& tables, RankOf where) {
  const auto refuse = [&](const std::string& got) {
    TORCH_CHECK_VALUE(false, error_text(kPsArea, "load: got a checkpoint " + got, where,
                                        "Load it into a server of the tables that it was saved "
                                        "from."));
  };
  const Json extra = text.empty() ? Json::object() : Json::parse(text);
  if (!extra.contains(kServer)) refuse("of no parameter server, expected one of a server's");
  const Json& saved = extra[kServer];
  const Json own = description_of(tables);
  for (const auto& [name, description] : own.items())
    if (!saved.contains(name)) refuse(c10::str("without table '", name, "', expected it"));
  for (const auto& [name, description] : saved.items()) {
    if (!own.contains(name)) refuse(c10::str("with table '", name, "', which the server has not"));
    if (description != own[name])
      refuse(c10::str("of table '", name, "' as ", description.dump(), ", expected ",
                      own[name].dump()));
  }
}

}  // namespace

void save_tables(const std::string& path, const Tables& tables,
                 const std::vector<SharesByHost>& shares) {
  CheckpointContent content = content_of_all(tables, shares);
  Json extra;
  extra[kServer] = description_of(tables);
  content.texts[kExtraText] = extra.dump();
  save_checkpoint({path, content}, {});
}

void load_tables(const std::string& path, const Tables& tables, RankOf where) {
  const CheckpointReader reader(path, {});
  reader.verify({kModelTensors, kOptimizerTensors, kTableTensors});
  check_description(reader.text(kExtraText), tables, where);
  const CheckpointContent expected =
      content_of(tables, [&](const Table& table, const std::string& prefix) {
        return table.expected_of(reader, prefix);
      });
  for (const auto& [kind, tensors] : expected.tensors) reader.check(kind, tensors);
  for (const auto& table : tables) table->make_room(reader);
  const CheckpointContent content = places_of(tables);
  for (const auto& [kind, places] : content.tensors) reader.read(kind, places);
  for (const auto& table : tables) table->read_rest(reader);
}

void load_buffers(const std::string& path, const Tables& tables) {
  Places places;
  for (const auto& table : tables)
    for (CheckpointTensor& buffer : buffers_of(*table, tables)) places.push_back(std::move(buffer));
  if (!places.empty()) CheckpointReader(path, {}).read(kModelTensors, places);
}

}  // namespace trireme::ps

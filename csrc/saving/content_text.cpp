#include <trireme/saving/content_text.h>

#include <trireme/comm/host.h>
#include <trireme/saving/json_text.h>
#include <trireme/saving/optimizer_text.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/liveness.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <utility>

namespace trireme {
namespace {

using Json = nlohmann::json;

std::string random_name() {
  std::random_device source;
  char text[24];
  std::snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

// Returns a name of this rank's host. The boot of a machine would be one name for several
// simulated hosts on it, but an engine without shared memory knows no other.
std::string host_name(const CheckpointRanks& ranks) {
  Host* host = ranks.communicator ? ranks.communicator->host() : nullptr;
  if (host == nullptr) return shm::host_boot();
  const auto& hosts = host->group().hosts();
  for (size_t index = 0; index < hosts.size(); ++index)
    if (std::find(hosts[index].begin(), hosts[index].end(), ranks.where().rank) !=
        hosts[index].end())
      return std::to_string(index);
  return "0";  // a rank alone
}

// Returns the place of a part: its first indices, then its sizes; null for an empty part.
Json place_of(const CheckpointTensor& tensor) {
  const at::Tensor& values = tensor.part.values;
  if (!values.defined() || values.numel() == 0) return nullptr;
  std::vector<int64_t> place = tensor.part.first;
  place.resize(tensor.sizes.size());
  place.insert(place.end(), values.sizes().begin(), values.sizes().end());
  return place;
}

TensorPlace place_from(const Json& row) {
  TensorPlace place{row.at(0).get<std::string>(), static_cast<at::ScalarType>(row.at(1).get<int>()),
                    row.at(2).get<std::vector<int64_t>>()};
  if (row.at(3).is_null()) return place;
  const auto numbers = row.at(3).get<std::vector<int64_t>>();
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(place.sizes.size());
  place.box = TensorBox{{numbers.begin(), middle}, {middle, numbers.end()}};
  return place;
}

class ContentText {
 public:
  ContentText(const CheckpointContent& content, ContentGoes goes, const CheckpointRanks& ranks)
      : content_(content), goes_(goes), where_(ranks.where()) {
    all_["save"] = random_name();
    all_["host"] = host_name(ranks);
    all_["tensors"] = Json::object();
    all_["texts"] = Json::object();
  }

  std::string make() {
    for (const auto& [kind, tensors] : content_.tensors) add_tensors(kind, tensors);
    for (const auto& [name, text] : content_.texts) {
      if (name == kExtraText && where_.rank != 0) continue;
      check_text(name, text);
      all_["texts"][name] = text;
    }
    try {
      return all_.dump();
    } catch (const Json::exception&) {  // Texts were checked, so it is a name.
      refuse("a tensor whose name is not UTF-8", "Give it a name of characters.");
    }
    return {};
  }

 private:
  void add_tensors(const std::string& kind, const std::vector<CheckpointTensor>& tensors) {
    Json& rows = all_["tensors"][kind] = Json::array();
    std::set<std::string> names;
    for (const CheckpointTensor& tensor : tensors) {
      check_tensor(tensor);
      if (!names.insert(tensor.name).second)
        refuse("two tensors called '" + tensor.name + "'", "Give one of them another name.");
      rows.push_back({tensor.name, static_cast<int>(tensor.dtype), tensor.sizes, place_of(tensor)});
    }
  }

  void check_tensor(const CheckpointTensor& tensor) const {
    if (goes_ == ContentGoes::kToFiles && safetensors_dtype(tensor.dtype).empty())
      refuse("'" + tensor.name + "' as " + describe(tensor.dtype, tensor.sizes) +
                 ", for which safetensors has no name",
             "Keep it as real numbers, or in `extra`.");
    const at::Tensor& values = tensor.part.values;
    if (goes_ == ContentGoes::kToRanks && values.defined() &&
        (values.layout() != at::kStrided || values.is_quantized() || values.is_meta()))
      refuse("'" + tensor.name + "' as " +
                 c10::str(values.scalar_type(), " in layout ", values.layout(), " on ",
                          values.device()) +
                 ", expected dense memory",
             "Make it dense, or leave it out.");
  }

  // Throws ValueError for a text that cannot be saved.
  void check_text(const std::string& name, const std::string& text) const {
    if (name != kOptimizerText && name != kExtraText)
      refuse("a text called '" + name + "'", "Keep it in `extra`.");
    try {
      if (name == kExtraText) return check_json(text);
      merge_json({text});
    } catch (const JsonTextError& error) {
      const std::string what = name == kExtraText ? "`extra`" : "'" + name + "'";
      refuse(what + " with " + error.what() + ", expected a JSON object",
             "Keep other things in tensors.");
    }
  }

  void refuse(const std::string& got, const std::string& next_step) const {
    TORCH_CHECK_VALUE(false, error_text("saving", "got " + got, where_, next_step));
  }

  const CheckpointContent& content_;
  ContentGoes goes_;
  RankOf where_;
  Json all_;
};

ContentOfRank content_from(const std::string& text) {
  const Json all = Json::parse(text);
  ContentOfRank content{
      all.at("save").get<std::string>(), all.at("host").get<std::string>(), {}, {}};
  for (const auto& [kind, rows] : all.at("tensors").items()) {
    std::vector<TensorPlace>& places = content.tensors[kind];
    for (const Json& row : rows) places.push_back(place_from(row));
  }
  content.texts = all.at("texts").get<std::map<std::string, std::string>>();
  return content;
}

}  // namespace

std::vector<ContentOfRank> gather_contents(const CheckpointContent& content, ContentGoes where,
                                           const CheckpointRanks& ranks) {
  std::string own;
  together(ranks, [&] { own = ContentText(content, where, ranks).make(); });
  std::vector<ContentOfRank> all;
  for (const std::string& text : gather_texts(own, ranks)) all.push_back(content_from(text));
  return all;
}

std::map<std::string, std::string> merge_texts(const std::vector<ContentOfRank>& all,
                                               RankOf where) {
  std::map<std::string, std::vector<TextOfRank>> by_name;
  for (size_t rank = 0; rank < all.size(); ++rank)
    for (const auto& [name, text] : all[rank].texts)
      by_name[name].push_back({static_cast<int64_t>(rank), text});
  std::map<std::string, std::string> merged;
  for (const auto& [name, texts] : by_name)
    merged[name] = name == kExtraText ? texts.front().text : merge_optimizer_texts(texts, where);
  return merged;
}

PlacesByRank places_of(const std::vector<ContentOfRank>& all, const std::string& kind) {
  PlacesByRank places;
  for (const ContentOfRank& content : all) {
    const auto found = content.tensors.find(kind);
    places.push_back(found == content.tensors.end() ? std::vector<TensorPlace>() : found->second);
  }
  return places;
}

std::vector<int64_t> hosts_of(const std::vector<ContentOfRank>& all) {
  std::vector<int64_t> hosts;
  for (const ContentOfRank& content : all) {
    const auto same = [&](const ContentOfRank& other) { return other.host == content.host; };
    hosts.push_back(std::find_if(all.begin(), all.end(), same) - all.begin());
  }
  return hosts;
}

}  // namespace trireme

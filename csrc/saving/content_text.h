#pragma once

#include <trireme/common/export.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/redistribute_plan.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trireme {

// What one rank tells the others of its content: no values.
struct ContentOfRank {
  std::string save;                                         // a random name
  std::string host;                                         // equal for ranks of one host
  std::map<std::string, std::vector<TensorPlace>> tensors;  // by kind
  std::map<std::string, std::string> texts;
};

// Where tensors of a content go. Only files need the format's name of a dtype.
enum class ContentGoes : uint8_t { kToFiles, kToRanks };

// Returns what every rank has to say of its content, by rank. Collective. Throws ValueError on all
// ranks if one of them has a content that cannot go there, naming what.
std::vector<ContentOfRank> gather_contents(const CheckpointContent& content, ContentGoes where,
                                           const CheckpointRanks& ranks);

// Returns the texts of all ranks as one each; see CheckpointContent::texts.
std::map<std::string, std::string> merge_texts(const std::vector<ContentOfRank>& all, RankOf where);

// Returns the places of one kind of tensors, by rank.
PlacesByRank places_of(const std::vector<ContentOfRank>& all, const std::string& kind);
// Returns a number per rank that is equal for ranks of one host.
std::vector<int64_t> hosts_of(const std::vector<ContentOfRank>& all);

}  // namespace trireme

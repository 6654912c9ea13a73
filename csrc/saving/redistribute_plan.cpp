#include <trireme/saving/redistribute_plan.h>

#include <trireme/saving/checkpoint.h>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

// See [Note: which rank sends what to which] in redistribute_plan.h.

namespace trireme {
namespace {

using Piece = RedistributePlan::Piece;
using Message = RedistributePlan::Message;
using Ranks = std::vector<int64_t>;

// Ranks by the box that they have, or need, of one tensor; ascending.
using RanksByBox = std::map<TensorBox, Ranks>;

// A part of a tensor whose elements the same ranks have.
struct Cell {
  TensorBox box;
  std::set<int64_t> holders = {};
};

// Cuts a box into parts by who holds them.
std::vector<Cell> cells_of(const TensorBox& box, const RanksByBox& holders) {
  std::vector<Cell> cells{{box}};
  for (const auto& [held, ranks] : holders) {
    std::vector<Cell> next;
    for (Cell& cell : cells) {
      const auto inside = intersection(cell.box, held);
      if (inside)
        for (TensorBox& outside : cut_out(cell.box, *inside))
          next.push_back({std::move(outside), cell.holders});
      if (inside) cell.box = *inside;
      if (inside) cell.holders.insert(ranks.begin(), ranks.end());
      next.push_back(std::move(cell));
    }
    cells = std::move(next);
  }
  return cells;
}

int64_t element_bytes(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<TensorBox> cut_by_bytes(const TensorBox& box, at::ScalarType dtype, int64_t bytes) {
  return cut(box, std::max<int64_t>(bytes / element_bytes(dtype), 1));
}

// Counts bytes per rank, and finds the rank that has least.
class Loads {
 public:
  explicit Loads(size_t world) : bytes_(world, 0) {}
  void add(int64_t rank, int64_t bytes) { bytes_[static_cast<size_t>(rank)] += bytes; }
  // Returns the lowest of those ranks that have least.
  template <typename Candidates>
  int64_t least(const Candidates& ranks) const {
    return *std::min_element(ranks.begin(), ranks.end(), [this](int64_t one, int64_t other) {
      return std::pair(of(one), one) < std::pair(of(other), other);
    });
  }

 private:
  int64_t of(int64_t rank) const { return bytes_[static_cast<size_t>(rank)]; }
  std::vector<int64_t> bytes_;
};

// Collects pieces in messages, and puts these in an order in which all senders are busy.
class MessageQueue {
 public:
  MessageQueue(const RedistributePlan& plan, int64_t most_bytes)
      : plan_(plan), most_bytes_(most_bytes), turns_(static_cast<size_t>(plan.world), 0) {}

  void add(int64_t from, const Ranks& to, const Piece& piece, bool is_forwarded) {
    const int64_t bytes = plan_.bytes_of(piece);
    const auto [open, is_new] = open_.try_emplace({from, to, is_forwarded}, Open{});
    if (is_new || open->second.bytes + bytes > most_bytes_) {
      open->second = {entries_.size(), 0};
      entries_.push_back(
          {turns_[static_cast<size_t>(from)]++, Message{from, to, {}, is_forwarded}});
    }
    open->second.bytes += bytes;
    entries_[open->second.index].message.pieces.push_back(piece);
  }

  std::vector<Message> finish() {
    std::stable_sort(entries_.begin(), entries_.end(),
                     [](const Entry& one, const Entry& other) { return one.key() < other.key(); });
    std::vector<Message> messages;
    for (Entry& entry : entries_) messages.push_back(std::move(entry.message));
    return messages;
  }

 private:
  struct Open {
    size_t index = 0;
    int64_t bytes = 0;
  };
  struct Entry {
    int64_t turn;  // number of the message among those of its sender
    Message message;
    std::tuple<bool, int64_t, int64_t> key() const {
      return {message.is_forwarded, turn, message.from};
    }
  };

  const RedistributePlan& plan_;
  int64_t most_bytes_;
  std::vector<int64_t> turns_;
  std::map<std::tuple<int64_t, Ranks, bool>, Open> open_;
  std::vector<Entry> entries_;
};

RedistributePlan empty_plan(size_t world) {
  RedistributePlan plan;
  plan.world = static_cast<int64_t>(world);
  plan.kept.resize(world);
  return plan;
}

class Planner {
 public:
  Planner(const RedistributePlanRequest& request, RankOf where)
      : request_(request),
        where_(where),
        hosts_(request.hosts),
        plan_(empty_plan(request.needed.size())),
        loads_(request.needed.size()),
        queue_(plan_, request.message_bytes) {
    hosts_.resize(request.needed.size(), 0);
    collect(request.needed, &Known::needed, /*adds=*/true);
    collect(request.held, &Known::held, /*adds=*/false);
  }

  RedistributePlan make() {
    for (size_t index = 0; index < known_.size(); ++index)
      for (const auto& [box, ranks] : known_[index].needed) plan_box(index, box, ranks);
    plan_.messages = queue_.finish();
    return std::move(plan_);
  }

 private:
  // A tensor, who holds it and who needs it.
  struct Known {
    TensorPlace first;  // the place that was named first, by `rank`
    size_t rank;
    RanksByBox held = {};
    RanksByBox needed = {};
  };

  void collect(const PlacesByRank& places, RanksByBox Known::* boxes, bool adds) {
    for (size_t rank = 0; rank < places.size(); ++rank)
      for (const TensorPlace& place : places[rank]) {
        Known* known = find(place, rank, adds);
        if (known == nullptr || !place.box) continue;
        Ranks& ranks = (known->*boxes)[*place.box];
        if (ranks.empty() || ranks.back() != static_cast<int64_t>(rank))
          ranks.push_back(static_cast<int64_t>(rank));
      }
  }

  Known* find(const TensorPlace& place, size_t rank, bool adds) {
    const auto found = indices_.find(place.name);
    if (found == indices_.end() && !adds) return nullptr;  // nobody needs it
    if (found == indices_.end()) {
      indices_.emplace(place.name, known_.size());
      plan_.tensors.push_back({place.name, place.dtype, place.sizes});
      return &known_.emplace_back(Known{place, rank});
    }
    Known& known = known_[found->second];
    if (known.first.dtype != place.dtype || known.first.sizes != place.sizes)
      refuse("'" + place.name + "' as " + describe(place.dtype, place.sizes) + " on rank " +
                 std::to_string(rank) + " and as " +
                 describe(known.first.dtype, known.first.sizes) + " on rank " +
                 std::to_string(known.rank),
             "Use the same model on all ranks, before and after.");
    return &known;
  }

  void plan_box(size_t index, const TensorBox& box, const Ranks& ranks) {
    const Known& known = known_[index];
    for (Cell& cell : cells_of(box, known.held)) {
      if (cell.holders.empty())
        refuse("no rank that holds '" + known.first.name + "'" + trireme::text_of(cell.box) +
                   ", which rank " + std::to_string(ranks.front()) + " needs",
               "Keep the ranks that hold it, or load a checkpoint.");
      if (request_.of_lowest.count(known.first.name) > 0) cell.holders = {*cell.holders.begin()};
      Ranks others;
      for (const int64_t rank : ranks) {
        if (cell.holders.count(rank) == 0) {
          others.push_back(rank);
        } else {
          plan_.kept[static_cast<size_t>(rank)].push_back({index, cell.box});
        }
      }
      if (!others.empty()) plan_cell(index, cell, others);
    }
  }

  void plan_cell(size_t index, const Cell& cell, const Ranks& to) {
    const at::ScalarType dtype = plan_.tensors[index].dtype;
    for (TensorBox& box : cut_by_bytes(cell.box, dtype, request_.message_bytes))
      plan_piece({index, std::move(box)}, cell.holders, to);
  }

  // Sends a piece to ranks that do not have it.
  void plan_piece(const Piece& piece, const std::set<int64_t>& holders, const Ranks& to) {
    if (static_cast<int64_t>(to.size()) == plan_.world - 1)
      return send(*holders.begin(), to, piece, false);
    std::map<int64_t, Ranks> by_host;
    for (const int64_t rank : to) by_host[host_of(rank)].push_back(rank);
    Ranks first_of_hosts;
    for (const auto& [host, ranks] : by_host) {
      Ranks near;
      for (const int64_t holder : holders)
        if (host_of(holder) == host) near.push_back(holder);
      if (near.empty()) {
        first_of_hosts.push_back(ranks.front());
        if (ranks.size() > 1) send(ranks.front(), {ranks.begin() + 1, ranks.end()}, piece, true);
      } else {
        send(loads_.least(near), ranks, piece, false);
      }
    }
    std::sort(first_of_hosts.begin(), first_of_hosts.end());
    if (!first_of_hosts.empty()) send(loads_.least(holders), first_of_hosts, piece, false);
  }

  void send(int64_t from, const Ranks& to, const Piece& piece, bool is_forwarded) {
    loads_.add(from, plan_.bytes_of(piece) * static_cast<int64_t>(to.size()));
    queue_.add(from, to, piece, is_forwarded);
  }

  int64_t host_of(int64_t rank) const { return hosts_[static_cast<size_t>(rank)]; }

  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const {
    C10_THROW_ERROR(ValueError, error_text("saving", "got " + got, where_, next_step));
  }

  const RedistributePlanRequest& request_;
  RankOf where_;
  std::vector<int64_t> hosts_;
  std::vector<Known> known_;  // as plan_.tensors
  std::unordered_map<std::string, size_t> indices_;
  RedistributePlan plan_;
  Loads loads_;
  MessageQueue queue_;
};

// The ranks that need a tensor, and may read it.
struct Readers {
  const TensorPlace* first;
  bool are_alike = true;  // all need one dtype
  RanksByBox by_box = {};
};

std::vector<Readers> readers_of(const PlacesByRank& needed) {
  std::vector<Readers> all;
  std::unordered_map<std::string, size_t> indices;
  for (size_t rank = 0; rank < needed.size(); ++rank)
    for (const TensorPlace& place : needed[rank]) {
      if (!place.box) continue;
      const auto [found, is_new] = indices.try_emplace(place.name, all.size());
      if (is_new) all.push_back({&place});
      Readers& readers = all[found->second];
      readers.are_alike = readers.are_alike && readers.first->dtype == place.dtype;
      readers.by_box[*place.box].push_back(static_cast<int64_t>(rank));
    }
  return all;
}

// Adds the parts of one tensor to what each rank reads. What one rank needs alone stays whole.
void share_reads(const Readers& readers, int64_t message_bytes, Loads& loads, PlacesByRank& reads) {
  const TensorPlace& tensor = *readers.first;
  for (const Cell& cell : cells_of(whole_box(tensor.sizes), readers.by_box)) {
    if (cell.holders.empty()) continue;
    const int64_t most = cell.holders.size() == 1 ? INT64_MAX : message_bytes;
    for (TensorBox& box : cut_by_bytes(cell.box, tensor.dtype, most)) {
      const int64_t reader = loads.least(cell.holders);
      loads.add(reader, box.numel() * element_bytes(tensor.dtype));
      reads[static_cast<size_t>(reader)].push_back(
          {tensor.name, tensor.dtype, tensor.sizes, std::move(box)});
    }
  }
}

}  // namespace

int64_t RedistributePlan::bytes_of(const Piece& piece) const {
  return piece.box.numel() * element_bytes(tensors[piece.tensor].dtype);
}

int64_t RedistributePlan::bytes_of(const Message& message) const {
  int64_t bytes = 0;
  for (const Piece& piece : message.pieces) bytes += bytes_of(piece);
  return bytes;
}

std::string RedistributePlan::text_of(const std::vector<Piece>& pieces) const {
  const Piece& first = pieces.front();
  const std::string text = "'" + tensors[first.tensor].name + "'" + trireme::text_of(first.box);
  return pieces.size() == 1 ? text : text + " and " + std::to_string(pieces.size() - 1) + " more";
}

std::string RedistributePlan::text() const {
  const auto listed = [this](const std::vector<Piece>& pieces) {
    std::string text;
    for (const Piece& piece : pieces) text += (text.empty() ? "" : ", ") + text_of({piece});
    return text;
  };
  std::string text;
  for (size_t rank = 0; rank < kept.size(); ++rank)
    if (!kept[rank].empty())
      text += "rank " + std::to_string(rank) + " keeps " + listed(kept[rank]) + "\n";
  for (const Message& message : messages) {
    text += "rank " + std::to_string(message.from) + " -> ";
    for (size_t i = 0; i < message.to.size(); ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(message.to[i]);
    text += ": " + listed(message.pieces) + (message.is_forwarded ? ", forwarded\n" : "\n");
  }
  return text;
}

RedistributePlan plan_redistribute(const RedistributePlanRequest& request, RankOf where) {
  return Planner(request, where).make();
}

PlacesByRank plan_reads(const PlacesByRank& needed, int64_t message_bytes) {
  PlacesByRank reads(needed.size());
  Loads loads(needed.size());
  for (const Readers& readers : readers_of(needed))
    if (readers.are_alike) share_reads(readers, message_bytes, loads, reads);
  return reads;
}

}  // namespace trireme

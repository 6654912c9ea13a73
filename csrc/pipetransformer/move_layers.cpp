#include <trireme/pipetransformer/move_layers.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/resolved.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/memory/snapshot.h>
#include <trireme/pipetransformer/layer_memory.h>
#include <trireme/pipetransformer/rank_agreement.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

namespace trireme {
namespace {

using Json = nlohmann::json;
using Numbers = std::vector<int64_t>;
using Tensors = std::vector<at::Tensor>;

bool has(const Numbers& ranks, int64_t rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Tensors of a layer as bytes, which an engine moves together.
class LayerBytes {
 public:
  // `engine`: where the engine moves what is on the CPU.
  explicit LayerBytes(c10::Device engine) : engine_(engine) {}

  void add(const at::Tensor& tensor, bool is_written) {
    if (tensor.numel() == 0) return;
    const at::Tensor own = tensor.detach();
    const c10::Device device = own.is_cpu() ? engine_ : own.device();
    const bool lies_ready = lies_plain(own) && own.device() == device;
    at::Tensor moved = own;
    if (!lies_ready)
      moved = is_written ? at::empty(own.sizes(), own.options().device(device))
                         : resolved(own).contiguous().to(device);
    runs_[device.type()].push_back(moved.view({-1}).view(at::kByte));
    if (is_written) written_.push_back({tensor, lies_ready ? at::Tensor() : moved});
  }

  // Returns one list for each type of device.
  std::vector<Tensors> runs() const {
    std::vector<Tensors> all;
    for (const auto& [device, run] : runs_) all.push_back(run);
    return all;
  }

  // Puts what has come where it belongs.
  void finish() {
    for (const auto& [tensor, moved] : written_) {
      if (moved.defined()) tensor.copy_(moved);
      if (!moved.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  c10::Device engine_;
  std::map<c10::DeviceType, Tensors> runs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;
};

// The ranks of one broadcast, the lowest in front of those that get the layer.
Numbers ranks_of(const LayerMove& move) {
  Numbers ranks{*std::min_element(move.before.begin(), move.before.end())};
  for (const int64_t rank : move.after)
    if (!has(move.before, rank)) ranks.push_back(rank);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

// Brings the tensors of a layer from one rank to others.
class LayerGroup {
 public:
  LayerGroup(Communicator& all, Numbers ranks) : all_(all), ranks_(std::move(ranks)) {
    if (static_cast<int64_t>(ranks_.size()) == all.world()) return;
    std::string name = "layers of";
    for (const int64_t rank : ranks_) name += " " + std::to_string(rank);
    part_ = all.split(std::vector<int>(ranks_.begin(), ranks_.end()), name);
    is_split_ = true;
  }

  void move(const Tensors& bytes, int64_t from, const std::string& label) {
    const auto place = std::find(ranks_.begin(), ranks_.end(), from) - ranks_.begin();
    if (!is_split_) return all_.broadcast(bytes, from, label).wait();
    if (part_) return part_->broadcast(bytes, place, label).wait();
    if (all_.rank() != from) return all_.recv(bytes, from, label).wait();
    std::vector<Pending> sent;
    for (const int64_t rank : ranks_)
      if (rank != from) sent.push_back(all_.send(bytes, rank, label));
    for (Pending& pending : sent) pending.wait();
  }

  void announce_failure(const std::string& why) noexcept {
    if (part_) part_->announce_failure(why);
  }

 private:
  Communicator& all_;
  Numbers ranks_;
  bool is_split_ = false;
  std::shared_ptr<Communicator> part_;  // null where the engine makes none
};

// One move of all layers, from what is compared to what is taken.
class LayersMove {
 public:
  LayersMove(const std::vector<LayerMove>& moves, const std::string& plan, Communicator& all)
      : moves_(moves), plan_(plan), all_(all), arrivals_(moves.size()) {}

  std::vector<std::optional<MovedState>> run() {
    const at::NoGradGuard no_grad;
    agree_on_ranks(
        {"layers that move", "ranks that move layers differently",
         "Make the same run, and call the same of it, on all ranks."},
        [this] { return text(); }, &all_);
    learn_states(gather_texts(said_, all_, all_.device()));
    work_on_ranks(
        "the plan " + plan_, "Free memory, or stay with the plan that is.", [this] { make_room(); },
        &all_);
    keep_snapshots();
    carry();
    std::vector<std::optional<MovedState>> moved;
    for (Arrival& arrival : arrivals_) moved.push_back(take(arrival));
    return moved;
  }

 private:
  // What comes to this rank: memory for tensors that have none, and the state.
  struct Arrival {
    bool is_awaited = false;
    std::vector<std::pair<at::Tensor, at::Tensor>> room = {};
    Tensors written = {};
    MovedState state = {};
    Json said = {};  // of the state, by the ranks that have it
  };

  bool is_sent(const LayerMove& move) const { return ranks_of(move).size() > 1; }
  bool arrives(const LayerMove& move) const {
    return has(move.after, all_.rank()) && !has(move.before, all_.rank());
  }

  std::string text() {
    std::string text = "the plan " + plan_;
    Json said = Json::array();
    for (const LayerMove& move : moves_) {
      check(move);
      said.push_back(said_of(move));
      const std::string name = "\nlayer '" + move.name + "' ";
      text += name + c10::str("from ranks ", at::IntArrayRef(move.before), " to ",
                              at::IntArrayRef(move.after));
      for (const auto& [key, tensor] : move.tensors)
        text += name + c10::str("with '", key, "' of ", tensor.scalar_type(), " ", tensor.sizes());
    }
    said_ = said.dump();
    return text;
  }

  void check(const LayerMove& move) const {
    const std::string of = " of layer '" + move.name + "'";
    for (const Numbers& ranks : {move.before, move.after})
      if (ranks.empty() || !std::is_sorted(ranks.begin(), ranks.end()) || ranks.front() < 0 ||
          ranks.back() >= all_.world())
        refuse_elastic(c10::str("got ranks ", at::IntArrayRef(ranks), of), &all_,
                       "Pass those of the group, sorted.");
    const bool is_held = has(move.before, all_.rank());
    if (!is_held && (!move.state.empty() || !move.values.empty()))
      refuse_elastic("got optimizer state" + of + " on a rank that does not hold it", &all_,
                     "Leave it out.");
    for (const NamedTensors& tensors : {move.tensors, move.state}) {
      for (const auto& [key, tensor] : tensors) {
        if (!tensor.defined() || tensor.layout() != at::kStrided)
          refuse_elastic("got '" + key + "'" + of + ", which is no dense tensor", &all_,
                         "Make it one.");
        if (is_held && !has_memory(tensor))
          refuse_elastic("got '" + key + "'" + of + " without memory on a rank that holds it",
                         &all_, "Give the ranks that hold the layer.");
      }
    }
  }

  // Tells all ranks which optimizer state goes with each layer.
  void learn_states(const std::vector<std::string>& texts) {
    std::vector<Json> all;
    for (const std::string& said : texts) all.push_back(Json::parse(said));
    for (size_t i = 0; i < moves_.size(); ++i) {
      const auto first = static_cast<size_t>(moves_[i].before.front());
      arrivals_[i].said = all[first][i];
      for (const int64_t rank : moves_[i].before) {
        if (all[static_cast<size_t>(rank)][i]["tensors"] == all[first][i]["tensors"]) continue;
        refuse_elastic(c10::str("got other optimizer state of layer '", moves_[i].name,
                                "' on rank ", rank, " than on rank ", first),
                       &all_, "Step the optimizers of all ranks alike.");
      }
    }
  }

  Json said_of(const LayerMove& move) const {
    Json said = {{"tensors", Json::array()}, {"values", ""}};
    if (!has(move.before, all_.rank()) || !is_sent(move)) return said;
    for (const auto& [key, tensor] : move.state)
      said["tensors"].push_back(Json{key, static_cast<int>(tensor.scalar_type()),
                                     tensor.sizes().vec(), memory_strides(tensor),
                                     tensor.is_cpu()});
    if (all_.rank() == move.before.front()) said["values"] = move.values;
    return said;
  }

  void make_room() {
    std::vector<Arrival> arrivals(moves_.size());
    try {
      for (size_t i = 0; i < moves_.size(); ++i) {
        arrivals[i].said = arrivals_[i].said;
        if (arrives(moves_[i])) prepare(moves_[i], arrivals[i]);
      }
    } catch (const std::exception& error) {
      refuse_elastic("got no memory for the plan " + plan_ + ": " + one_line(what_of(error)), &all_,
                     "Free memory, or stay with the plan that is.");
    }
    arrivals_ = std::move(arrivals);
  }

  static void prepare(const LayerMove& move, Arrival& arrival) {
    arrival.is_awaited = true;
    c10::Device device = c10::kCPU;
    for (const auto& [key, tensor] : move.tensors) {
      device = tensor.device();
      if (!has_memory(tensor)) arrival.room.emplace_back(tensor, memory_like(tensor));
      arrival.written.push_back(has_memory(tensor) ? tensor : arrival.room.back().second);
    }
    arrival.state.values = arrival.said["values"].get<std::string>();
    for (const Json& said : arrival.said["tensors"]) {
      const auto options = at::TensorOptions()
                               .dtype(static_cast<at::ScalarType>(said[1].get<int>()))
                               .device(said[4].get<bool>() ? c10::Device(c10::kCPU) : device);
      arrival.state.state.emplace_back(
          said[0].get<std::string>(),
          at::empty_strided(said[2].get<Numbers>(), said[3].get<Numbers>(), options));
    }
    for (const auto& [key, tensor] : arrival.state.state) arrival.written.push_back(tensor);
    for (const at::Tensor& tensor : arrival.written) bring_pages(tensor);
  }

  // A save beside training may still read what is written here, or freed afterwards.
  void keep_snapshots() const {
    Tensors all;
    for (const LayerMove& move : moves_)
      for (const NamedTensors& tensors : {move.tensors, move.state})
        for (const auto& [key, tensor] : tensors) all.push_back(tensor);
    keep_snapshots_of(all);
  }

  // All ranks go through the layers in one order, so no rank waits for one that waits for it.
  void carry() {
    std::vector<std::unique_ptr<LayerGroup>> groups;
    try {
      for (size_t i = 0; i < moves_.size(); ++i) {
        const Numbers ranks = ranks_of(moves_[i]);
        if (ranks.size() < 2 || !has(ranks, all_.rank())) continue;
        groups.push_back(std::make_unique<LayerGroup>(all_, ranks));
        carry(moves_[i], arrivals_[i], *groups.back());
      }
      // Who has all it needs still hears of a rank that could not go on.
      gather_texts("", all_, all_.device());
    } catch (const std::exception& error) {
      const std::string why = "moving layers: " + one_line(what_of(error));
      for (const auto& group : groups) group->announce_failure(why);
      all_.announce_failure(why);
      throw;
    }
  }

  void carry(const LayerMove& move, const Arrival& arrival, LayerGroup& group) {
    LayerBytes bytes(all_.device());
    for (const at::Tensor& tensor : arrival.written) bytes.add(tensor, /*is_written=*/true);
    if (!arrival.is_awaited)
      for (const NamedTensors& tensors : {move.tensors, move.state})
        for (const auto& [key, tensor] : tensors) bytes.add(tensor, /*is_written=*/false);
    for (const Tensors& run : bytes.runs())
      group.move(run, move.before.front(), "layer '" + move.name + "' for the plan " + plan_);
    bytes.finish();
  }

  static std::optional<MovedState> take(Arrival& arrival) {
    if (!arrival.is_awaited) return std::nullopt;
    for (const auto& [tensor, memory] : arrival.room) take_memory(tensor, memory);
    return std::move(arrival.state);
  }

  const std::vector<LayerMove>& moves_;
  const std::string& plan_;
  Communicator& all_;
  std::string said_;  // of the states that this rank has
  std::vector<Arrival> arrivals_;
};

}  // namespace

std::vector<std::optional<MovedState>> move_layers(const std::vector<LayerMove>& moves,
                                                   const std::string& plan, Communicator* ranks) {
  if (ranks == nullptr) return std::vector<std::optional<MovedState>>(moves.size());
  return LayersMove(moves, plan, *ranks).run();
}

}  // namespace trireme

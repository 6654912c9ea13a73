#include <trireme/strategies/local_sgd/rounds_checkpoint.h>

#include <trireme/common/error.h>
#include <trireme/memory/bucket_plan.h>
#include <trireme/saving/held_rounds.h>
#include <trireme/saving/optimizer_text.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<CheckpointTensor>;
constexpr const char* kState = "state";
constexpr int64_t kStateNumbers = 6;

CheckpointTensor part_of(const std::string& name, const at::Tensor& values, const RoundPart& part) {
  return {name, values.scalar_type(), part.sizes, {values.detach(), part.first}};
}

CheckpointTensor whole(const std::string& name, const at::Tensor& values) {
  return {name,
          values.scalar_type(),
          values.sizes().vec(),
          {values, std::vector<int64_t>(static_cast<size_t>(values.dim()), 0)}};
}

std::string arrived_name(const RoundPart& part) { return "arrived:" + part.name; }

// Returns what is kept of codes beside residuals is called, since it is that of one part.
std::string beside_name(const char* what, const RoundPart& part) {
  return c10::str(what, ":", part.name, "@", c10::Join("-", part.first));
}

// Returns the real numbers of a parameter as checkpoints have residuals.
CheckpointTensor residual_of(const std::string& prefix, const at::Tensor& residual,
                             const at::Tensor& anchor, RoundPart part) {
  std::vector<int64_t> sizes = anchor.sizes().vec();
  if (anchor.is_complex()) {
    for (std::vector<int64_t>* of : {&sizes, &part.sizes}) of->push_back(2);
    part.first.push_back(0);
  }
  return part_of(prefix + "residual:" + part.name, residual.view(sizes), part);
}

// What codes keep, by parameter.
std::map<size_t, KeptOfCode*> kept_codes(Rounds& rounds, bool makes) {
  std::map<size_t, KeptOfCode*> kept;
  if (rounds.coder() == nullptr) return kept;
  rounds.coder()->senders();
  for (const size_t index : rounds.own()) {
    const RoundParameter& parameter = rounds.parameters()[index];
    ParameterInfo info;
    info.name = parameter.name;
    info.sizes = parameter.anchor.sizes().vec();
    info.numel = parameter.anchor.numel();
    info.dtype = parameter.anchor.scalar_type();
    for (const KeptPart& part : rounds.coder()->kept_parts({info}, {parameter.anchor}, makes))
      kept.emplace(index, part.kept);
  }
  return kept;
}

at::Tensor state_tensor(Rounds& rounds) {
  const RoundState& state = rounds.state();
  const auto& arrived = rounds.wait_for_fragment();
  const int64_t fragment = arrived ? static_cast<int64_t>(arrived->fragment) : -1;
  const int64_t codes = rounds.coder() != nullptr ? rounds.coder()->steps() : 0;
  return at::tensor(
      {state.steps, state.step, state.round, rounds.workers().world(), fragment, codes}, at::kLong);
}

// Parts that go as fp32 have left nothing out, while another rank's part of the same parameter may
// be coded.
void add_residuals(Rounds& rounds, const std::vector<RoundPart>& parts, const std::string& prefix,
                   const std::map<size_t, KeptOfCode*>& codes, Tensors& tensors) {
  for (const size_t index : rounds.own()) {
    const at::Tensor& anchor = rounds.parameters()[index].anchor;
    const auto found = codes.find(index);
    const bool is_kept = found != codes.end() && found->second->residual.defined();
    const int64_t numel = anchor.numel() * (anchor.is_complex() ? 2 : 1);
    const at::Tensor residual = is_kept ? found->second->residual : at::zeros({numel}, at::kFloat);
    tensors.push_back(residual_of(prefix, residual, anchor, parts[index]));
  }
}

void add_codes(Rounds& rounds, const std::vector<RoundPart>& parts, const std::string& prefix,
               Tensors& tensors) {
  if (rounds.coder() == nullptr) return;
  const std::map<size_t, KeptOfCode*> codes = kept_codes(rounds, /*makes=*/false);
  if (has_error_feedback(rounds.coder()->compression()))
    add_residuals(rounds, parts, prefix, codes, tensors);
  for (const auto& [index, kept] : codes) {
    const RoundPart& part = parts[index];
    if (kept->basis.defined())
      tensors.push_back(whole(prefix + beside_name("basis", part), kept->basis));
    if (kept->threshold != 0)
      tensors.push_back(whole(prefix + beside_name("threshold", part),
                              at::full({1}, kept->threshold, at::kFloat)));
  }
}

// Reads residuals: of one worker, or the mean over several.
void read_residuals(Rounds& rounds, const std::vector<RoundPart>& parts,
                    const std::vector<int64_t>& workers, const CheckpointSource& source) {
  const auto& known = source.tensors(kRoundsTensors);
  const std::map<size_t, KeptOfCode*> kept = kept_codes(rounds, /*makes=*/true);
  for (const int64_t worker : workers) {
    Tensors needed;
    std::vector<std::pair<at::Tensor, at::Tensor>> sums;
    for (const auto& [index, code] : kept) {
      if (!code->residual.defined()) continue;
      const at::Tensor values = at::zeros_like(code->residual);
      CheckpointTensor tensor = residual_of(worker_prefix(worker), values,
                                            rounds.parameters()[index].anchor, parts[index]);
      if (!known.contains(tensor.name)) continue;
      needed.push_back(std::move(tensor));
      sums.emplace_back(code->residual, values);
    }
    source.read(kRoundsTensors, needed);
    for (const auto& [sum, values] : sums)
      sum.add_(values, 1.0 / static_cast<double>(workers.size()));
  }
}

void read_beside(Rounds& rounds, const std::vector<RoundPart>& parts, const std::string& prefix,
                 const CheckpointSource& source) {
  const auto& known = source.tensors(kRoundsTensors);
  Tensors needed;
  std::vector<std::pair<KeptOfCode*, at::Tensor>> thresholds;
  for (const auto& [index, code] : kept_codes(rounds, /*makes=*/true)) {
    const auto basis = known.find(prefix + beside_name("basis", parts[index]));
    if (basis != known.end()) {
      code->basis = at::empty(basis->second.sizes, at::kFloat);
      needed.push_back(whole(basis->first, code->basis));
    }
    const auto threshold = known.find(prefix + beside_name("threshold", parts[index]));
    if (threshold == known.end()) continue;
    thresholds.emplace_back(code, at::empty({1}, at::kFloat));
    needed.push_back(whole(threshold->first, thresholds.back().second));
  }
  source.read(kRoundsTensors, needed);
  for (const auto& [code, value] : thresholds) code->threshold = value.item<float>();
}

// Returns the fragment that was on its way.
std::optional<ArrivedFragment> read_arrived(const Rounds& rounds,
                                            const std::vector<RoundPart>& parts, int64_t fragment,
                                            const CheckpointSource& source) {
  const auto count = static_cast<int64_t>(rounds.fragments().size());
  Tensors needed;
  if (fragment < 0 || fragment >= count) {
    source.read(kRoundsTensors, needed);
    return std::nullopt;
  }
  ArrivedFragment arrived{static_cast<size_t>(fragment), std::nullopt};
  const auto& known = source.tensors(kRoundsTensors);
  std::vector<at::Tensor> means;
  for (const size_t index : rounds.own(rounds.fragments()[arrived.fragment])) {
    const auto found = known.find(arrived_name(parts[index]));
    if (found == known.end()) continue;
    const at::Tensor& anchor = rounds.parameters()[index].anchor;
    means.push_back(at::empty(anchor.sizes(), anchor.options().dtype(found->second.dtype)));
    needed.push_back(part_of(found->first, means.back(), parts[index]));
  }
  source.read(kRoundsTensors, needed);
  const bool has_means = std::any_of(known.begin(), known.end(), [](const auto& tensor) {
    return tensor.first.starts_with("arrived:");
  });
  if (has_means) arrived.means = std::move(means);
  return arrived;
}

// Reads the parameters of this worker in place.
void read_parameters(Rounds& rounds, const std::vector<RoundPart>& parts,
                     const CheckpointSource& source) {
  std::vector<size_t> all(rounds.parameters().size());
  std::iota(all.begin(), all.end(), size_t{0});
  const std::string prefix = worker_prefix(rounds.workers().rank());
  rounds.door().write([&] {
    const std::vector<at::Tensor> values = rounds.door().values(all);
    Tensors needed;
    for (const size_t index : all)
      if (values[index].numel() > 0)
        needed.push_back(
            part_of(prefix + "parameter:" + parts[index].name, values[index], parts[index]));
    source.read(kRoundsTensors, needed);
  });
}

void check_state(const Rounds& rounds, const CheckpointSource& source) {
  const auto& known = source.tensors(kRoundsTensors);
  const auto state = known.find(kState);
  TORCH_CHECK_VALUE(
      state != known.end() && state->second.sizes == std::vector<int64_t>{kStateNumbers},
      error_text(kRoundsArea, "got a checkpoint of rounds without their state",
                 rounds.workers().rank_of(), "Load one that save_checkpoint has written."));
}

}  // namespace

std::string worker_prefix(int64_t number) { return "worker " + std::to_string(number) + ":"; }

void put_anchors(const Rounds& rounds, const std::vector<RoundPart>& parts, Tensors& tensors) {
  std::set<std::string> names;
  for (const RoundPart& part : parts) names.insert(part.name);
  std::erase_if(tensors,
                [&](const CheckpointTensor& tensor) { return names.contains(tensor.name); });
  for (size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor& anchor = rounds.parameters()[i].anchor;
    if (anchor.defined())
      tensors.push_back(part_of(parts[i].name, anchor, parts[i]));
    else  // another rank of this worker has it
      tensors.push_back(
          {parts[i].name, rounds.parameters()[i].parameter.scalar_type(), parts[i].sizes, {}});
  }
}

Tensors rounds_to_save(Rounds& rounds, const std::vector<RoundPart>& parts) {
  const at::NoGradGuard no_grad;
  const std::string prefix = worker_prefix(rounds.workers().rank());
  Tensors tensors{whole(kState, state_tensor(rounds)),
                  whole(prefix + "weight", at::full({1}, rounds.state().weight, at::kDouble))};
  const std::vector<size_t> own = rounds.own();
  const std::vector<at::Tensor> values = rounds.door().values(own);
  for (size_t i = 0; i < own.size(); ++i)
    tensors.push_back(
        part_of(prefix + "parameter:" + parts[own[i]].name, values[i], parts[own[i]]));
  if (const auto& arrived = rounds.wait_for_fragment(); arrived && arrived->means) {
    const std::vector<size_t> sent = rounds.own(rounds.fragments()[arrived->fragment]);
    for (size_t i = 0; i < sent.size(); ++i)
      tensors.push_back(
          part_of(arrived_name(parts[sent[i]]), (*arrived->means)[i], parts[sent[i]]));
  }
  add_codes(rounds, parts, prefix, tensors);
  return tensors;
}

bool load_rounds(Rounds& rounds, const std::vector<RoundPart>& parts,
                 const CheckpointSource& source) {
  const at::NoGradGuard no_grad;
  check_state(rounds, source);
  const at::Tensor numbers = at::empty({kStateNumbers}, at::kLong);
  source.read(kRoundsTensors, {whole(kState, numbers)});
  const auto* said = numbers.const_data_ptr<int64_t>();
  RoundState state{said[0], said[1], said[2], 1};
  const int64_t saved = said[3];
  const bool is_same = saved == rounds.workers().world();
  rounds.take_anchors();
  std::vector<int64_t> workers(static_cast<size_t>(saved));
  std::iota(workers.begin(), workers.end(), int64_t{0});
  if (is_same) workers = {rounds.workers().rank()};
  if (rounds.coder() != nullptr) {
    rounds.coder()->forget();
    rounds.coder()->set_steps(said[5]);
    read_residuals(rounds, parts, workers, source);
  }
  if (!is_same) {
    state.step = 0;
    rounds.restore(state, std::nullopt);
    return false;
  }
  const std::string prefix = worker_prefix(rounds.workers().rank());
  const at::Tensor weight = at::empty({1}, at::kDouble);
  source.read(kRoundsTensors, {whole(prefix + "weight", weight)});
  state.weight = weight.item<double>();
  read_beside(rounds, parts, prefix, source);
  rounds.restore(state, read_arrived(rounds, parts, said[4], source));
  read_parameters(rounds, parts, source);
  return true;
}

std::string merge_texts_of(int64_t worker, const std::string& text, const CheckpointRanks& ranks) {
  const std::string own = std::to_string(worker) + "\n";
  std::vector<TextOfRank> texts;
  const std::vector<std::string> said = gather_texts(own + text, ranks);
  for (size_t rank = 0; rank < said.size(); ++rank)
    if (said[rank].starts_with(own))
      texts.push_back({static_cast<int64_t>(rank), said[rank].substr(own.size())});
  return merge_optimizer_texts(texts, ranks.where());
}

}  // namespace trireme

#include <trireme/saving/saved_codes.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<CheckpointTensor>;

std::string residual_of(const std::string& name) { return "residual:" + name; }
std::string basis_of(const KeptCodes& codes, const std::string& name) {
  return "basis:" + name + codes.shard_text();
}
std::string threshold_of(const KeptCodes& codes, const std::string& name) {
  return "threshold:" + name + codes.shard_text();
}
std::string steps_of(const KeptCodes& codes, const std::string& prefix) {
  return "steps:" + prefix + name_of(codes.coder->compression());
}

bool has(const CheckpointSource& checkpoint, const std::string& name) {
  return checkpoint.tensors(kCompressionTensors).contains(name);
}

// Returns the elements of one sender's residual, of `senders`.
CheckpointTensor residual_tensor(const KeptPart& part, const at::Tensor& values, int64_t senders,
                                 int64_t sender) {
  return {residual_of(part.name),
          at::kFloat,
          {senders, part.numel},
          {values.view({1, -1}), {sender, part.begin}}};
}

CheckpointTensor threshold_tensor(const std::string& name, const at::Tensor& value, int64_t senders,
                                  int64_t sender) {
  return {name, at::kFloat, {senders}, {value, {sender}}};
}

CheckpointTensor whole(const std::string& name, const at::Tensor& values) {
  return {name,
          values.scalar_type(),
          values.sizes().vec(),
          {values, std::vector<int64_t>(static_cast<size_t>(values.dim()), 0)}};
}

void add_to_save(const KeptCodes& codes, Tensors& tensors) {
  const GradientCoder& coder = *codes.coder;
  const int64_t senders = codes.coder->senders();
  tensors.push_back(
      whole(steps_of(codes, codes.prefix), at::tensor({coder.steps(), senders}, at::kLong)));
  for (const KeptPart& part : codes.parts(/*makes=*/false)) {
    const KeptOfCode& kept = *part.kept;
    if (kept.residual.defined())
      tensors.push_back(residual_tensor(part, kept.residual, senders, part.sender));
    if (kept.basis.defined()) tensors.push_back(whole(basis_of(codes, part.name), kept.basis));
    // Of each sender: one that saw zeros only has a threshold of 0.
    if (has_threshold(coder.compression(), part.coded))
      tensors.push_back(threshold_tensor(threshold_of(codes, part.name),
                                         at::full({1}, kept.threshold, at::kFloat), senders,
                                         part.sender));
  }
}

void say_that_codes_begin_anew(RankOf where) {
  if (where.rank != 0) return;
  TORCH_WARN_ONCE(error_text(
      "compression", "codes begin with residuals of zeros: the checkpoint has none of this method",
      where, "What earlier codes left out is lost; training goes on."));
}

// The codes of a checkpoint that a coder takes over.
struct SavedCodes {
  const CheckpointSource& source;
  int64_t senders;  // that there were
};

// Reads the residuals that this rank codes with: of its sender, or the mean over the senders that
// there were.
void read_residuals(const SavedCodes& saved, const std::vector<KeptPart>& parts, int64_t senders) {
  const bool is_mean = senders != saved.senders;
  for (int64_t sender = 0; sender < (is_mean ? saved.senders : 1); ++sender) {
    Tensors needed;
    std::vector<at::Tensor> values;
    for (const KeptPart& part : parts) {
      values.push_back(is_mean ? at::zeros_like(part.kept->residual) : part.kept->residual);
      if (has(saved.source, residual_of(part.name)))
        needed.push_back(
            residual_tensor(part, values.back(), saved.senders, is_mean ? sender : part.sender));
    }
    saved.source.read(kCompressionTensors, needed);
    for (size_t i = 0; is_mean && i < parts.size(); ++i)
      parts[i].kept->residual.add_(values[i], 1.0 / static_cast<double>(saved.senders));
  }
}

// Reads what a method keeps beside its residuals.
void read_others(const SavedCodes& saved, const KeptCodes& codes,
                 const std::vector<KeptPart>& parts) {
  Tensors needed;
  std::vector<std::pair<KeptOfCode*, at::Tensor>> thresholds;
  const auto& known = saved.source.tensors(kCompressionTensors);
  for (const KeptPart& part : parts) {
    const auto basis = known.find(basis_of(codes, part.name));
    if (basis != known.end()) {
      part.kept->basis = at::empty(basis->second.sizes, at::kFloat);
      needed.push_back(whole(basis->first, part.kept->basis));
    }
    const std::string threshold = threshold_of(codes, part.name);
    if (codes.coder->senders() != saved.senders || !known.contains(threshold)) continue;
    thresholds.emplace_back(part.kept, at::empty({1}, at::kFloat));
    needed.push_back(
        threshold_tensor(threshold, thresholds.back().second, saved.senders, part.sender));
  }
  saved.source.read(kCompressionTensors, needed);
  for (const auto& [kept, value] : thresholds) kept->threshold = value.item<float>();
}

void load(const KeptCodes& codes, const CheckpointSource& checkpoint, const std::string& steps) {
  GradientCoder& coder = *codes.coder;
  const int64_t senders = coder.senders();
  const at::Tensor counts = at::empty({2}, at::kLong);
  checkpoint.read(kCompressionTensors, {whole(steps, counts)});
  coder.set_steps(counts[0].item<int64_t>());
  const SavedCodes saved{checkpoint, counts[1].item<int64_t>()};
  const std::vector<KeptPart> parts = codes.parts(/*makes=*/true);
  if (has_error_feedback(coder.compression())) read_residuals(saved, parts, senders);
  read_others(saved, codes, parts);
}

}  // namespace

std::optional<Tensors> codes_to_save(const std::vector<KeptCodes>& codes) {
  Tensors tensors;
  for (const KeptCodes& one : codes)
    if (one.coder->steps() > 0) add_to_save(one, tensors);
  return tensors.empty() ? std::nullopt : std::optional(std::move(tensors));
}

void check_codes(const std::vector<KeptCodes>& codes, const CheckpointSource& checkpoint,
                 RankOf where) {
  const auto& known = checkpoint.tensors(kCompressionTensors);
  for (const KeptCodes& one : codes) {
    if (!has(checkpoint, steps_of(one, one.prefix))) continue;
    for (const ParameterInfo& info : one.parameters) {
      const auto found = known.find(residual_of(info.name));
      if (found == known.end()) continue;
      const int64_t numel = c10::isComplexType(info.dtype) ? 2 * info.numel : info.numel;
      TORCH_CHECK_VALUE(
          found->second.sizes.size() == 2 && found->second.sizes[1] == numel,
          error_text("compression",
                     "got a residual of '" + info.name + "', " +
                         describe(found->second.dtype, found->second.sizes) + ", expected " +
                         std::to_string(numel) + " elements per sender",
                     where, "Load a checkpoint of this model."));
    }
  }
}

void load_codes(const std::vector<KeptCodes>& codes, const CheckpointSource& checkpoint,
                RankOf where) {
  for (const KeptCodes& one : codes) {
    one.coder->forget();
    // Another number of coders may have saved it.
    for (const std::string& prefix : {one.prefix, codes.front().prefix}) {
      const std::string steps = steps_of(one, prefix);
      if (!has(checkpoint, steps)) continue;
      load(one, checkpoint, steps);
      break;
    }
    if (one.coder->steps() == 0) say_that_codes_begin_anew(where);
  }
}

}  // namespace trireme

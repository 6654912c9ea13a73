#include <trireme/strategies/ddp/ddp_codes.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<CheckpointTensor>;

const BucketLayout& layout_of(const Ddp& ddp) { return ddp.reducer().layout(); }

std::string residual_of(const std::string& name) { return "residual:" + name; }
std::string basis_of(const std::string& name) { return "basis:" + name; }
std::string threshold_of(const std::string& name) { return "threshold:" + name; }
std::string steps_of(const Ddp& ddp, const std::string& prefix) {
  return "steps:" + prefix + name_of(ddp.coder()->compression());
}

bool has(const CheckpointSource& checkpoint, const std::string& name) {
  return checkpoint.tensors(kCompressionTensors).contains(name);
}

// Returns the elements of one sender's residual, of `senders`.
CheckpointTensor residual_tensor(const std::string& name, const at::Tensor& values, int64_t senders,
                                 int64_t sender, const KeptPart& part) {
  return {residual_of(name),
          at::kFloat,
          {senders, part.numel},
          {values.view({1, -1}), {sender, part.begin}}};
}

CheckpointTensor threshold_tensor(const std::string& name, const at::Tensor& value, int64_t senders,
                                  int64_t sender) {
  return {threshold_of(name), at::kFloat, {senders}, {value, {sender}}};
}

CheckpointTensor whole(const std::string& name, const at::Tensor& values) {
  return {name,
          values.scalar_type(),
          values.sizes().vec(),
          {values, std::vector<int64_t>(static_cast<size_t>(values.dim()), 0)}};
}

void say_that_codes_begin_anew(const Ddp& ddp, const char* why) {
  if (ddp.communicator()->rank() != 0) return;
  TORCH_WARN_ONCE(error_text(
      "compression", std::string("codes begin with residuals of zeros: ") + why,
      ddp.communicator()->rank_of(), "What earlier codes left out is lost; training goes on."));
}

// Reads the residuals that this rank codes with: of its sender, or the mean over the senders that
// there were.
void read_residuals(const CheckpointSource& checkpoint, std::vector<KeptPart>& parts,
                    const std::string& prefix, int64_t senders, int64_t saved) {
  const bool is_mean = senders != saved;
  for (int64_t sender = 0; sender < (is_mean ? saved : 1); ++sender) {
    Tensors needed;
    std::vector<at::Tensor> values;
    for (const KeptPart& part : parts) {
      values.push_back(is_mean ? at::empty_like(part.kept->residual) : part.kept->residual);
      if (has(checkpoint, residual_of(prefix + part.name)))
        needed.push_back(residual_tensor(prefix + part.name, values.back(), saved,
                                         is_mean ? sender : part.sender, part));
      else
        values.back().zero_();
    }
    checkpoint.read(kCompressionTensors, needed);
    for (size_t i = 0; is_mean && i < parts.size(); ++i)
      parts[i].kept->residual.add_(values[i], 1.0 / static_cast<double>(saved));
  }
}

// Reads what a method keeps beside its residuals.
void read_others(const CheckpointSource& checkpoint, std::vector<KeptPart>& parts,
                 const std::string& prefix, int64_t senders, int64_t saved) {
  Tensors needed;
  std::vector<std::pair<KeptPart*, at::Tensor>> thresholds;
  for (KeptPart& part : parts) {
    const auto& known = checkpoint.tensors(kCompressionTensors);
    const auto basis = known.find(basis_of(prefix + part.name));
    if (basis != known.end()) {
      part.kept->basis = at::empty(basis->second.sizes, at::kFloat);
      needed.push_back(whole(basis->first, part.kept->basis));
    }
    if (senders != saved || !known.contains(threshold_of(prefix + part.name))) continue;
    thresholds.emplace_back(&part, at::empty({1}, at::kFloat));
    needed.push_back(
        threshold_tensor(prefix + part.name, thresholds.back().second, saved, part.sender));
  }
  checkpoint.read(kCompressionTensors, needed);
  for (const auto& [part, value] : thresholds) part->kept->threshold = value.item<float>();
}

}  // namespace

std::vector<KeptPart> kept_codes(const Ddp& ddp) {
  if (ddp.coder() == nullptr) return {};
  return ddp.coder()->kept_parts(layout_of(ddp).infos(), layout_of(ddp).parameters(),
                                 /*makes=*/false);
}

std::optional<Tensors> codes_to_save(const Ddp& ddp, const std::string& prefix) {
  if (ddp.coder() == nullptr || ddp.coder()->steps() == 0) return std::nullopt;
  const int64_t senders = ddp.coder()->senders();
  Tensors tensors{whole(steps_of(ddp, prefix), at::full({1}, ddp.coder()->steps(), at::kLong))};
  for (const KeptPart& part : kept_codes(ddp)) {
    const std::string name = prefix + part.name;
    const KeptOfCode& kept = *part.kept;
    if (kept.residual.defined())
      tensors.push_back(residual_tensor(name, kept.residual, senders, part.sender, part));
    if (kept.basis.defined()) tensors.push_back(whole(basis_of(name), kept.basis));
    if (kept.threshold != 0)
      tensors.push_back(
          threshold_tensor(name, at::full({1}, kept.threshold, at::kFloat), senders, part.sender));
  }
  return tensors;
}

void check_codes(const Ddp& ddp, const CheckpointSource& checkpoint, const std::string& prefix) {
  if (ddp.coder() == nullptr || !has(checkpoint, steps_of(ddp, prefix))) return;
  const auto& known = checkpoint.tensors(kCompressionTensors);
  for (const ParameterInfo& info : layout_of(ddp).infos()) {
    const auto found = known.find(residual_of(prefix + info.name));
    if (found == known.end()) continue;
    const int64_t numel = c10::isComplexType(info.dtype) ? 2 * info.numel : info.numel;
    TORCH_CHECK_VALUE(
        found->second.sizes.size() == 2 && found->second.sizes[1] == numel,
        error_text("compression",
                   "got a residual of '" + info.name + "', " +
                       describe(found->second.dtype, found->second.sizes) + ", expected " +
                       std::to_string(numel) + " elements per sender",
                   ddp.communicator()->rank_of(), "Load a checkpoint of this model."));
  }
}

void load_codes(const Ddp& ddp, const CheckpointSource& checkpoint, const std::string& prefix) {
  GradientCoder* coder = ddp.coder();
  if (coder == nullptr) return;
  coder->forget();
  if (!has(checkpoint, steps_of(ddp, prefix)))
    return say_that_codes_begin_anew(ddp, "the checkpoint has none of this method");
  const int64_t senders = coder->senders();
  std::vector<KeptPart> parts =
      coder->kept_parts(layout_of(ddp).infos(), layout_of(ddp).parameters(), /*makes=*/true);
  const at::Tensor steps = at::empty({1}, at::kLong);
  checkpoint.read(kCompressionTensors, {whole(steps_of(ddp, prefix), steps)});
  coder->set_steps(steps.item<int64_t>());
  int64_t saved = senders;
  for (const auto& [name, tensor] : checkpoint.tensors(kCompressionTensors))
    if (tensor.sizes.size() == 2 && name.starts_with("residual:")) saved = tensor.sizes.front();
  if (has_error_feedback(coder->compression()))
    read_residuals(checkpoint, parts, prefix, senders, saved);
  read_others(checkpoint, parts, prefix, senders, saved);
}

}  // namespace trireme

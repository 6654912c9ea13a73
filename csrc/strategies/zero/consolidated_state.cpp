#include <trireme/strategies/zero/consolidated_state.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/error.h>
#include <trireme/memory/stream_handoff.h>

#include <ATen/ATen.h>

#include <bit>
#include <iomanip>
#include <sstream>
#include <string>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kBatchBytes = int64_t{32} << 20;

// The description that other ranks get of one value of one parameter's state.
enum class ValueKind : char {
  kTensor = 't',
  kInt = 'i',
  kDouble = 'd',  // its bits
  kBool = 'b',
  kNone = 'n',
  kText = 's',
  kForeign = 'x',
};
struct Described {
  size_t parameter = 0;
  std::string name;
  ValueKind kind = ValueKind::kNone;
  int64_t number = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::string text;
};

ValueKind kind_of(const c10::IValue& value) {
  if (value.isTensor()) return ValueKind::kTensor;
  if (value.isInt()) return ValueKind::kInt;
  if (value.isDouble()) return ValueKind::kDouble;
  if (value.isBool()) return ValueKind::kBool;
  if (value.isString()) return ValueKind::kText;
  return value.isNone() ? ValueKind::kNone : ValueKind::kForeign;
}

int64_t number_of(const c10::IValue& value) {
  if (value.isTensor()) return static_cast<int64_t>(value.toTensor().scalar_type());
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return std::bit_cast<int64_t>(value.toDouble());
  return value.isBool() && value.toBool() ? 1 : 0;
}

std::string describe(const std::vector<ArchivedValues>& states) {
  std::ostringstream text;
  for (size_t i = 0; i < states.size(); ++i) {
    for (const auto& [name, value] : states[i]) {
      text << i << ' ' << std::quoted(name) << ' ' << static_cast<char>(kind_of(value)) << ' '
           << number_of(value);
      const auto sizes = value.isTensor() ? value.toTensor().sizes() : at::IntArrayRef();
      text << ' ' << sizes.size();
      for (const int64_t extent : sizes) text << ' ' << extent;
      if (value.isString()) text << ' ' << std::quoted(value.toStringRef());
      text << '\n';
    }
  }
  return text.str();
}

std::vector<Described> parse(const std::string& text) {
  std::vector<Described> all;
  std::istringstream stream(text);
  Described one;
  char kind = 0;
  size_t dims = 0;
  while (stream >> one.parameter >> std::quoted(one.name) >> kind >> one.number >> dims) {
    one.kind = static_cast<ValueKind>(kind);
    if (one.kind == ValueKind::kTensor) one.dtype = static_cast<at::ScalarType>(one.number);
    one.sizes.resize(dims);
    for (int64_t& extent : one.sizes) stream >> extent;
    if (one.kind == ValueKind::kText) stream >> std::quoted(one.text);
    all.push_back(one);
  }
  return all;
}

void refuse_foreign(const std::vector<Described>& of_rank, RankOf owner,
                    const std::vector<ShardedParameter>& parameters) {
  for (const Described& one : of_rank) {
    TORCH_CHECK_TYPE(
        one.kind != ValueKind::kForeign,
        error_text("zero",
                   "got state '" + one.name + "' of '" + parameters[one.parameter].info.name +
                       "', expected a tensor, number, truth value or text",
                   owner, "Keep it in tensors."));
  }
}

c10::IValue value_of(const Described& one) {
  if (one.kind == ValueKind::kInt) return one.number;
  if (one.kind == ValueKind::kDouble) return std::bit_cast<double>(one.number);
  if (one.kind == ValueKind::kBool) return one.number != 0;
  if (one.kind == ValueKind::kText) return one.text;
  return {};
}

// Moves the tensors of one rank's states to all, in batches, and hands them to `take` in order.
class TensorBroadcast {
 public:
  TensorBroadcast(Communicator& communicator, int64_t root, c10::Device device)
      : communicator_(communicator), root_(root), device_(device) {}

  // `own`: the value on the root, null elsewhere.
  void add(const Described& one, const c10::IValue* own) {
    at::Tensor tensor =
        own != nullptr ? own->toTensor().to(device_).contiguous()
                       : at::empty(one.sizes, at::TensorOptions().dtype(one.dtype).device(device_));
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    if (!batch_.empty() && batch_bytes_ + bytes > kBatchBytes) send();
    batch_.emplace_back(&one, std::move(tensor));
    batch_bytes_ += bytes;
  }

  void send() {
    std::vector<at::Tensor> tensors;
    for (const auto& [one, tensor] : batch_)
      if (tensor.numel() > 0) tensors.push_back(tensor);
    if (!tensors.empty())
      communicator_
          .broadcast(std::move(tensors), root_, "optimizer state of rank " + std::to_string(root_))
          .wait();
    for (const auto& [one, tensor] : batch_)
      if (take) take(*one, tensor.to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true));
    // No rank goes on while its part is under way: its program may end the group next.
    StreamHandoff sent(device_);
    sent.note();
    sent.wait();
    batch_.clear();
    batch_bytes_ = 0;
  }

  std::function<void(const Described&, at::Tensor)> take;

 private:
  Communicator& communicator_;
  int64_t root_;
  c10::Device device_;
  std::vector<std::pair<const Described*, at::Tensor>> batch_;
  int64_t batch_bytes_ = 0;
};

// `parts`: by rank, empty for those that own nothing.
ArchivedValues join(const std::vector<ArchivedValues>& parts, const ShardedParameter& parameter) {
  std::vector<size_t> owners;
  for (size_t rank = 0; rank < parts.size(); ++rank)
    if (parameter.is_owned_by(static_cast<int64_t>(rank))) owners.push_back(rank);
  const ArchivedValues& first = parts[owners.front()];
  const std::vector<int64_t> sizes = parameter.sizes_on(static_cast<int64_t>(owners.front()));
  ArchivedValues joined = first;
  for (const auto& [name, value] : first) {
    if (!value.isTensor() || value.toTensor().sizes() != at::IntArrayRef(sizes)) continue;
    std::vector<at::Tensor> pieces;
    for (const size_t rank : owners) {
      const auto piece = parts[rank].find(name);
      TORCH_CHECK(piece != parts[rank].end() && piece->second.isTensor(),
                  error_text("zero",
                             "got state '" + name + "' of '" + parameter.info.name +
                                 "' from rank " + std::to_string(owners.front()) +
                                 " and none from rank " + std::to_string(rank),
                             {}, "Step all ranks alike."));
      pieces.push_back(piece->second.toTensor().reshape({-1}));
    }
    joined[name] = at::cat(pieces).view(parameter.info.sizes);
  }
  return joined;
}

}  // namespace

bool ShardedParameter::is_owned_by(int64_t rank) const {
  return info.numel == 0 ? rank == 0 : ranges[static_cast<size_t>(rank)].numel > 0;
}

std::vector<int64_t> ShardedParameter::sizes_on(int64_t rank) const {
  return shard_sizes(info, ranges[static_cast<size_t>(rank)], placement);
}

std::vector<ShardedParameter> sharded_parameters(const std::vector<ParameterInfo>& infos,
                                                 const ShardPlan& plan) {
  std::vector<ShardedParameter> all;
  for (size_t i = 0; i < infos.size(); ++i)
    all.push_back({infos[i], plan.shards[i], plan.placement});
  return all;
}

std::vector<ArchivedValues> gather_states(const std::vector<ArchivedValues>& own,
                                          const std::vector<ShardedParameter>& parameters,
                                          Communicator& communicator, int64_t to) {
  const c10::Device device = parameters.front().info.device;
  const bool receives = communicator.rank() == to;
  std::vector<std::vector<Described>> described;
  for (const std::string& text : gather_texts(describe(own), communicator, device))
    described.push_back(parse(text));
  const auto world = static_cast<size_t>(communicator.world());
  for (size_t rank = 0; rank < world; ++rank)
    refuse_foreign(described[rank], {static_cast<int64_t>(rank), communicator.world()}, parameters);

  std::vector<std::vector<ArchivedValues>> parts(  // [parameter][rank]
      receives ? parameters.size() : 0, std::vector<ArchivedValues>(world));
  for (size_t rank = 0; rank < world; ++rank) {
    TensorBroadcast tensors(communicator, static_cast<int64_t>(rank), device);
    if (receives) {
      tensors.take = [&](const Described& one, at::Tensor tensor) {
        parts[one.parameter][rank][one.name] = std::move(tensor);
      };
    }
    const bool is_own = static_cast<int64_t>(rank) == communicator.rank();
    for (const Described& one : described[rank]) {
      if (one.kind == ValueKind::kTensor) {
        tensors.add(one, is_own ? &own[one.parameter].at(one.name) : nullptr);
      } else if (receives) {
        parts[one.parameter][rank][one.name] = value_of(one);
      }
    }
    tensors.send();
  }
  std::vector<ArchivedValues> states;
  for (size_t i = 0; i < parts.size(); ++i) {
    states.push_back(join(parts[i], parameters[i]));
    parts[i].clear();
  }
  return states;
}

ArchivedValues own_part(const ArchivedValues& whole, const ShardedParameter& parameter,
                        RankOf where) {
  ArchivedValues own = whole;
  const ShardRange& range = parameter.ranges[static_cast<size_t>(where.rank)];
  // An optimizer that works on whole parameters may keep what it likes.
  const bool is_cut = parameter.placement != ShardPlacement::kWhole && where.world > 1;
  for (auto& [name, value] : own) {
    if (!value.isTensor()) continue;
    at::Tensor tensor = value.toTensor();
    const bool is_alike = tensor.sizes() == at::IntArrayRef(parameter.info.sizes);
    TORCH_CHECK_VALUE(is_alike || tensor.dim() == 0 || !is_cut,
                      error_text("zero",
                                 "got state '" + name + "' of shape " + c10::str(tensor.sizes()) +
                                     " for '" + parameter.info.name + "' of shape " +
                                     c10::str(at::IntArrayRef(parameter.info.sizes)),
                                 where, "Load the state of the same model."));
    const c10::Device device = tensor.dim() == 0 ? tensor.device() : parameter.info.device;
    if (is_alike) {
      tensor = tensor.reshape({-1})
                   .narrow(0, range.begin, range.numel)
                   .view(parameter.sizes_on(where.rank));
    }
    value = tensor.to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  return own;
}

}  // namespace trireme

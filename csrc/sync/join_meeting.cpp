#include <trireme/sync/join_meeting.h>

#include <trireme/comm/gather_texts.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace trireme {
namespace {

// The columns of a rank's row: the call; zeros if the rank has run out.
enum Column : int64_t { kWhat, kJoinable, kFlags, kNumbers };
constexpr int64_t kColumns =
    kNumbers + static_cast<int64_t>(std::tuple_size_v<decltype(JoinCall::numbers)>);

void write_row(const JoinCall& call, double* row) {
  row[kWhat] = static_cast<double>(call.what);
  row[kJoinable] = static_cast<double>(call.joinable);
  row[kFlags] = static_cast<double>(call.flags);
  std::copy(call.numbers.begin(), call.numbers.end(), row + kNumbers);
}

std::optional<JoinCall> read_row(const double* row) {
  if (row[kWhat] == 0) return std::nullopt;
  JoinCall call{static_cast<int64_t>(row[kWhat]), static_cast<int64_t>(row[kFlags])};
  call.joinable = static_cast<int64_t>(row[kJoinable]);
  std::copy_n(row + kNumbers, call.numbers.size(), call.numbers.begin());
  return call;
}

}  // namespace

JoinMeeting::JoinMeeting(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)),
      calls_(static_cast<size_t>(communicator_->world()), JoinCall{}),
      active_(communicator_->world()) {}

void JoinMeeting::meet(const std::optional<JoinCall>& own) {
  const RankOf where = communicator_->rank_of();
  at::Tensor told = at::zeros({where.world, kColumns}, at::kDouble);
  if (own) write_row(*own, told.mutable_data_ptr<double>() + where.rank * kColumns);
  told = told.to(communicator_->device());
  communicator_->all_reduce({told}, ReduceOp::kSum, "who still has inputs").wait();
  const at::Tensor heard = told.cpu();

  active_ = 0;
  for (int64_t rank = where.world - 1; rank >= 0; --rank) {
    const auto* row = heard.const_data_ptr<double>() + rank * kColumns;
    auto& call = calls_[static_cast<size_t>(rank)] = read_row(row);
    if (!call) continue;
    ++active_;
    root_ = rank;
  }
}

JoinCall JoinMeeting::call() const {
  JoinCall call = calls_[static_cast<size_t>(root_)].value_or(JoinCall{});
  for (const auto& one : calls_)
    if (one) call.flags |= one->flags;
  return call;
}

bool JoinMeeting::has_run_out() const {
  return !calls_[static_cast<size_t>(communicator_->rank())].has_value();
}

std::string JoinMeeting::text_of_root(const std::string& own) {
  const bool is_root = communicator_->rank() == root_;
  auto texts = gather_texts(is_root ? own : "", *communicator_, communicator_->device());
  return std::move(texts[static_cast<size_t>(root_)]);
}

// Returns the root's, per parameter: 0 without a dense gradient, else 1 + its dtype.
std::vector<uint8_t> JoinMeeting::kinds_of_gradients(const std::vector<at::Tensor>& parameters) {
  at::Tensor kinds = at::zeros({static_cast<int64_t>(parameters.size())}, at::kByte);
  auto* kind = kinds.mutable_data_ptr<uint8_t>();
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& grad = parameter.grad();
    const bool is_told = grad.defined() && grad.layout() == at::kStrided;
    *kind++ = is_told ? static_cast<uint8_t>(1 + static_cast<int>(grad.scalar_type())) : 0;
  }
  kinds = kinds.to(communicator_->device());
  communicator_->broadcast({kinds}, root_, "which parameters have gradients").wait();
  kinds = kinds.cpu();
  const auto* told = kinds.const_data_ptr<uint8_t>();
  return {told, told + kinds.numel()};
}

void JoinMeeting::share_gradients(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  const std::vector<uint8_t> kinds = kinds_of_gradients(parameters);
  const bool is_root = communicator_->rank() == root_;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (has_run_out()) parameters[i].mutable_grad().reset();
    if (kinds[i] == 0) continue;
    const auto options = parameters[i].options().dtype(static_cast<at::ScalarType>(kinds[i] - 1));
    gradients.push_back(is_root ? parameters[i].grad().contiguous()
                                : at::empty(parameters[i].sizes(), options.requires_grad(false)));
    if (has_run_out()) parameters[i].mutable_grad() = gradients.back();
  }
  if (gradients.empty()) return;
  communicator_->broadcast(gradients, root_, "gradients for ranks without inputs").wait();
}

}  // namespace trireme

#include <trireme/saving/part_exchange.h>

#include <trireme/common/exception_text.h>
#include <trireme/common/resolved.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

constexpr size_t kMostInFlight = 4;
constexpr int64_t kAlignment = 16;  // of a piece in a message: the largest element

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Returns whether the part of a tensor on this rank contains a box.
bool contains(const CheckpointTensor& tensor, const TensorBox& box) {
  if (!tensor.part.values.defined() || tensor.part.values.dim() != int64_t(box.first.size()))
    return false;
  for (size_t dim = 0; dim < box.first.size(); ++dim) {
    const int64_t first = tensor.part.first.empty() ? 0 : tensor.part.first[dim];
    const int64_t end = first + tensor.part.values.size(static_cast<int64_t>(dim));
    if (box.first[dim] < first || box.first[dim] + box.sizes[dim] > end) return false;
  }
  return true;
}

at::Tensor as_bytes(const at::Tensor& values) { return values.view({-1}).view(at::kByte); }

// Calls visit(piece, view) for each piece of a message, with its place in `bytes`.
template <typename Visit>
void for_each_place(const RedistributePlan& plan, const RedistributePlan::Message& message,
                    const at::Tensor& bytes, const Visit& visit) {
  int64_t begin = 0;
  for (const RedistributePlan::Piece& piece : message.pieces) {
    const int64_t length = plan.bytes_of(piece);
    const at::Tensor place = bytes.narrow(0, begin, length);
    visit(piece, place.view(plan.tensors[piece.tensor].dtype).view(piece.box.sizes));
    begin += aligned(length);
  }
}

int64_t packed_bytes(const RedistributePlan& plan, const RedistributePlan::Message& message) {
  int64_t bytes = 0;
  for (const RedistributePlan::Piece& piece : message.pieces)
    bytes += aligned(plan.bytes_of(piece));
  return bytes;
}

}  // namespace

PartExchange::PartExchange(const RedistributePlan& plan, const std::vector<CheckpointTensor>& held,
                           const std::vector<CheckpointTensor>& needed,
                           const CheckpointRanks& ranks)
    : plan_(plan), held_(held), needed_(needed), ranks_(ranks) {
  for (size_t i = 0; i < held.size(); ++i) held_by_name_.emplace(held[i].name, i);
  for (size_t i = 0; i < needed.size(); ++i) needed_by_name_.emplace(needed[i].name, i);
}

void PartExchange::run() {
  const at::NoGradGuard no_grad;
  try {
    copy_kept();
    exchange();
    // Who has all it needs still hears of a rank that could not go on.
    gather_texts("", ranks_);
  } catch (const c10::DistBackendError&) {
    throw;
  } catch (const std::exception& error) {
    if (ranks_.communicator)
      ranks_.communicator->announce_failure("redistribute: " + one_line(what_of(error)));
    throw;
  }
}

void PartExchange::copy_kept() const {
  for (const Piece& piece : plan_.kept[static_cast<size_t>(ranks_.where().rank)]) {
    const at::Tensor from = held_values(piece);
    const at::Tensor to = values_to_write(piece);
    const bool is_there = from.data_ptr() == to.data_ptr() && from.strides() == to.strides() &&
                          from.dtype() == to.dtype();
    if (!is_there) to.copy_(from);
  }
}

void PartExchange::exchange() {
  bool is_forwarding = false;
  for (const Message& message : plan_.messages) {
    if (message.is_forwarded && !is_forwarding) finish_all();  // what is forwarded must be here
    is_forwarding = message.is_forwarded;
    start(message);
    while (flights_.size() > kMostInFlight) finish_first();
  }
  finish_all();
}

void PartExchange::start(const Message& message) {
  const int64_t rank = ranks_.where().rank;
  const bool is_sender = message.from == rank;
  if (!is_sender && !std::binary_search(message.to.begin(), message.to.end(), rank)) return;
  const at::Tensor bytes = bytes_of(message, is_sender);
  flights_.push_back({issue(message, {bytes}, is_sender), bytes, &message, !is_sender});
}

// Returns what is moved: the memory of the part itself, or memory of a message.
at::Tensor PartExchange::bytes_of(const Message& message, bool is_sender) const {
  const Piece& first = message.pieces.front();
  const at::Tensor place =
      place_of(message.pieces, is_sender ? values_to_send(message, first) : values_to_write(first));
  if (place.defined()) return place;
  const at::Tensor packed = at::empty({packed_bytes(plan_, message)},
                                      at::TensorOptions().dtype(at::kByte).device(ranks_.device));
  if (is_sender) pack(message, packed);
  return packed;
}

std::vector<Pending> PartExchange::issue(const Message& message,
                                         const std::vector<at::Tensor>& bytes, bool is_sender) {
  Communicator& communicator = *ranks_.communicator;
  const std::string label = plan_.text_of(message.pieces);
  std::vector<Pending> pending;
  if (message.to.size() > 1 && static_cast<int64_t>(message.to.size()) == plan_.world - 1) {
    pending.push_back(communicator.broadcast(bytes, message.from, label));
  } else if (!is_sender) {
    pending.push_back(communicator.recv(bytes, message.from, label));
  } else {
    for (const int64_t to : message.to) pending.push_back(communicator.send(bytes, to, label));
  }
  return pending;
}

void PartExchange::finish_first() {
  for (Pending& pending : flights_.front().pending) pending.wait();
  if (flights_.front().is_received) unpack(flights_.front());
  flights_.pop_front();
}

void PartExchange::finish_all() {
  while (!flights_.empty()) finish_first();
}

at::Tensor PartExchange::values_to_send(const Message& message, const Piece& piece) const {
  return message.is_forwarded ? values_to_write(piece) : held_values(piece);
}

at::Tensor PartExchange::held_values(const Piece& piece) const {
  const auto [begin, end] = held_by_name_.equal_range(plan_.tensors[piece.tensor].name);
  const auto found = std::find_if(
      begin, end, [&](const auto& item) { return contains(held_[item.second], piece.box); });
  TORCH_INTERNAL_ASSERT(found != end);
  const TensorPart& part = held_[found->second].part;
  return values_in(part.values.detach(), part.first, piece.box);
}

at::Tensor PartExchange::values_to_write(const Piece& piece) const {
  const TensorPart& part = needed_[needed_by_name_.at(plan_.tensors[piece.tensor].name)].part;
  return values_in(part.values.detach(), part.first, piece.box);
}

// Returns the memory of a message's only piece, if it can be moved where it lies; else undefined.
at::Tensor PartExchange::place_of(const std::vector<Piece>& pieces, const at::Tensor& first) const {
  const bool lies_ready = pieces.size() == 1 && lies_plain(first) &&
                          first.scalar_type() == plan_.tensors[pieces.front().tensor].dtype &&
                          first.device() == ranks_.device;
  return lies_ready ? as_bytes(first) : at::Tensor();
}

void PartExchange::pack(const Message& message, const at::Tensor& bytes) const {
  for_each_place(plan_, message, bytes, [&](const Piece& piece, const at::Tensor& place) {
    place.copy_(values_to_send(message, piece));
  });
}

void PartExchange::unpack(const Flight& flight) const {
  const std::vector<Piece>& pieces = flight.message->pieces;
  const at::Tensor first = values_to_write(pieces.front());
  if (place_of(pieces, first).defined()) {
    if (!first.is_inference()) first.unsafeGetTensorImpl()->bump_version();
    return;
  }
  for_each_place(
      plan_, *flight.message, flight.bytes,
      [&](const Piece& piece, const at::Tensor& place) { values_to_write(piece).copy_(place); });
}

}  // namespace trireme

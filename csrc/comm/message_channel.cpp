#include <trireme/comm/message_channel.h>

#include <trireme/common/duration.h>
#include <trireme/common/exception_text.h>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kHeadBytes = 2048;
constexpr int64_t kLine = 64;
// How long a look whether a message is through may take: an engine does not tell when it is.
constexpr std::chrono::milliseconds kBriefly{20};
constexpr int32_t kMagic = 0x6c6e6863;  // "chnl"

// The head of each message; behind it, or in a message of its own, lie the description, the text
// and, from the next multiple of 64 bytes on, the payload.
struct WireHead {
  int32_t magic = kMagic;
  int32_t device = 0;    // torch's number of the type; 0 is the CPU
  uint64_t channel = 0;  // hash of its name
  int64_t step = 0;
  int64_t micro_batch = 0;
  int64_t description_bytes = 0;
  int64_t text_bytes = 0;
  int64_t payload_bytes = 0;  // in CPU memory
  int64_t device_bytes = 0;

  int64_t payload_begin() const {
    return (description_bytes + text_bytes + kLine - 1) / kLine * kLine;
  }
  int64_t bytes() const { return payload_begin() + payload_bytes; }
  bool is_inline() const { return bytes() <= kHeadBytes - kLine; }
};
static_assert(sizeof(WireHead) <= kLine);

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

at::Tensor empty_bytes(int64_t bytes, c10::Device device) {
  return at::empty({bytes}, at::dtype(at::kByte).device(device));
}

// Adds the name of the message to an engine's error.
template <typename Call>
auto name_errors(const std::string& what, const ChannelName& name, Call&& call) {
  try {
    return call();
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(DistBackendError,
                    error_text(kChannelArea, what + " failed: " + first_line_of(error), name.where,
                               "Look for the error of that rank."));
  }
}

}  // namespace

EngineTensorSender::EngineTensorSender(std::shared_ptr<Communicator> pair, ChannelName name,
                                       int64_t slots, int64_t most_bytes)
    : pair_(std::move(pair)),
      name_(std::move(name)),
      packing_(name_, /*reaches_devices=*/true),
      slots_(static_cast<size_t>(slots)),
      most_bytes_(most_bytes) {}

void EngineTensorSender::send(const TensorMessage& message, const std::string& label) {
  packing_.plan(message, label);
  name_errors(name_.sending(label), name_, [&] {
    while (in_flight_.size() >= slots_ || bytes_in_flight_ > most_bytes_)
      wait_for_first(kLongestWait);
    WireHead head;
    head.channel = std::hash<std::string>()(name_.name);
    head.step = message.step;
    head.micro_batch = message.micro_batch;
    head.description_bytes = packing_.description_bytes();
    head.text_bytes = static_cast<int64_t>(message.text.size());
    head.payload_bytes = packing_.payload_bytes();
    head.device_bytes = packing_.device_bytes();
    if (packing_.device()) head.device = static_cast<int32_t>(packing_.device()->type());
    const at::Tensor first = at::zeros({kHeadBytes}, at::kByte);
    std::memcpy(bytes_of(first), &head, sizeof(head));
    const at::Tensor rest = head.is_inline() ? first.narrow(0, kLine, kHeadBytes - kLine)
                                             : empty_bytes(head.bytes(), c10::kCPU);
    if (head.description_bytes > 0)
      std::memcpy(bytes_of(rest), packing_.description().data(),
                  static_cast<size_t>(head.description_bytes));
    if (head.text_bytes > 0)
      std::memcpy(bytes_of(rest) + head.description_bytes, message.text.data(),
                  message.text.size());
    at::Tensor body;
    if (head.device_bytes > 0) body = empty_bytes(head.device_bytes, *packing_.device());
    packing_.copy_into(bytes_of(rest) + head.payload_begin(),
                       body.defined() ? bytes_of(body) : nullptr, message);
    const c10::Device device = pair_->device();
    std::vector<Pending> parts;
    parts.push_back(pair_->send({first.to(device)}, 1, label));
    if (!head.is_inline()) parts.push_back(pair_->send({rest.to(device)}, 1, label));
    if (body.defined()) parts.push_back(pair_->send({body}, 1, label));
    in_flight_.push_back({std::move(parts), head.bytes() + head.device_bytes});
    bytes_in_flight_ += in_flight_.back().bytes;
  });
}

// Returns whether the oldest message on its way is through before `patience` is over.
bool EngineTensorSender::wait_for_first(std::chrono::milliseconds patience) {
  for (Pending& part : in_flight_.front().parts)
    if (!part.wait_for(patience)) return false;
  bytes_in_flight_ -= in_flight_.front().bytes;
  in_flight_.pop_front();
  return true;
}

bool EngineTensorSender::is_drained() {
  name_errors(name_.sending("the last message"), name_, [&] {
    while (!in_flight_.empty() && wait_for_first(kBriefly)) {
    }
  });
  return in_flight_.empty();
}

EngineTensorReceiver::EngineTensorReceiver(std::shared_ptr<Communicator> pair, ChannelName name)
    : pair_(std::move(pair)), name_(std::move(name)) {
  if (pair_->device().is_cpu()) post_head();
}

void EngineTensorReceiver::post_head() {
  head_ = empty_bytes(kHeadBytes, pair_->device());
  posted_ = pair_->recv({head_}, 0, "a message by channel '" + name_.name + "'");
}

TensorMessage EngineTensorReceiver::receive(int64_t step, int64_t micro_batch,
                                            const std::string& label) {
  TensorMessage message = next(label);
  while (message.step < first_step_) message = next(label);
  name_.check_came(message, step, micro_batch, label);
  return message;
}

TensorMessage EngineTensorReceiver::next(const std::string& label) {
  return name_errors(name_.receiving(label), name_, [&] {
    const c10::Device device = pair_->device();
    if (!head_.defined()) post_head();
    posted_.wait();
    const at::Tensor first = std::exchange(head_, at::Tensor()).cpu();
    WireHead head;
    std::memcpy(&head, bytes_of(first), sizeof(head));
    const auto refuse_unless = [&](bool fine) {
      if (!fine)
        C10_THROW_ERROR(DistBackendError,
                        error_text(kChannelArea, "got what no channel sends", name_.where,
                                   "Run the same Trireme on every rank."));
    };
    constexpr int64_t kMost = INT64_MAX / 8;
    const auto fits = [](int64_t bytes) { return bytes >= 0 && bytes < kMost; };
    refuse_unless(head.magic == kMagic && head.channel == std::hash<std::string>()(name_.name) &&
                  fits(head.description_bytes) && fits(head.text_bytes) &&
                  fits(head.payload_bytes) && fits(head.device_bytes) && head.device >= 0 &&
                  head.device < static_cast<int32_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES));
    at::Tensor rest = first.narrow(0, kLine, kHeadBytes - kLine);
    at::Tensor body;
    Pending more;
    Pending on_device;
    if (!head.is_inline()) {
      rest = empty_bytes(head.bytes(), device);
      more = pair_->recv({rest}, 0, label);
    }
    const auto type = static_cast<c10::DeviceType>(head.device);
    const c10::Device there = type == c10::kCPU || type == device.type()
                                  ? device
                                  : c10::impl::VirtualGuardImpl(type).getDevice();
    if (head.device_bytes > 0) {
      body = empty_bytes(head.device_bytes, there);
      on_device = pair_->recv({body}, 0, label);
    }
    if (device.is_cpu()) post_head();
    more.wait();
    on_device.wait();
    rest = rest.cpu();
    TensorMessage message{head.step, head.micro_batch, {}, {}, {}};
    message.text.assign(reinterpret_cast<const char*>(bytes_of(rest) + head.description_bytes),
                        static_cast<size_t>(head.text_bytes));
    ArrivedTensors came{.description = {reinterpret_cast<const int64_t*>(bytes_of(rest)),
                                        static_cast<size_t>(head.description_bytes) / 8},
                        .payload = {bytes_of(rest) + head.payload_begin(), head.payload_bytes,
                                    std::make_shared<at::Tensor>(rest)},
                        .device = there};
    if (body.defined())
      came.on_device = {bytes_of(body), head.device_bytes, std::make_shared<at::Tensor>(body)};
    refuse_unless(unpack_tensors(came, message));
    return message;
  });
}

}  // namespace trireme

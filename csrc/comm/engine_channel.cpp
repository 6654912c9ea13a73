#include <trireme/comm/engine_channel.h>

#include <trireme/comm/message_head.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kFixedBytes = 512;  // of every message, with the length of its head in front
constexpr int64_t kRoom = kFixedBytes - static_cast<int64_t>(sizeof(int64_t));

at::Tensor bytes_on_host(int64_t bytes) { return at::empty({bytes}, at::kByte); }

class EngineSender final : public TensorSender {
 public:
  EngineSender(ChannelRequest request, std::shared_ptr<Communicator> pair)
      : request_(std::move(request)), pair_(std::move(pair)) {}

  void send(const TensorMessage& message, const std::string& label) override {
    const MessageHead head = MessageHead::of(message);
    const int64_t head_bytes = head.head_bytes();
    at::Tensor whole = bytes_on_host(std::max(kFixedBytes, head_bytes + kFixedBytes - kRoom));
    auto* data = static_cast<std::byte*>(whole.mutable_data_ptr());
    std::memset(data, 0, static_cast<size_t>(whole.numel()));
    std::memcpy(data, &head_bytes, sizeof(head_bytes));
    head.write({data + sizeof(head_bytes), static_cast<size_t>(head_bytes)});
    start(whole.narrow(0, 0, kFixedBytes), label + ": head");
    if (head_bytes > kRoom) {
      start(whole.narrow(0, kFixedBytes, head_bytes - kRoom).clone(), label + ": rest of the head");
    }
    if (head.payload_bytes > 0) {
      at::Tensor payload = bytes_on_host(head.payload_bytes);
      head.pack(message, static_cast<std::byte*>(payload.mutable_data_ptr()));
      start(payload, label);
    }
    messages_.push_back(parts_);
    parts_ = 0;
    while (static_cast<int64_t>(messages_.size()) > request_.slots) {
      for (; messages_.front() > 0; --messages_.front()) {
        sends_.front().wait();
        sends_.pop_front();
      }
      messages_.pop_front();
    }
  }

 private:
  void start(const at::Tensor& bytes, const std::string& label) {
    sends_.push_back(pair_->send({bytes.to(pair_->device())}, 1, label));
    ++parts_;
  }

  ChannelRequest request_;
  std::shared_ptr<Communicator> pair_;
  std::deque<Pending> sends_;
  std::deque<int64_t> messages_;  // how many sends each one is
  int64_t parts_ = 0;
};

class EngineReceiver final : public TensorReceiver {
 public:
  EngineReceiver(ChannelRequest request, std::shared_ptr<Communicator> pair)
      : request_(std::move(request)), pair_(std::move(pair)) {}

  TensorMessage receive(int64_t step, int64_t micro_batch, const std::string& label) override {
    const at::Tensor fixed = get(kFixedBytes, label + ": head");
    const auto* data = static_cast<const std::byte*>(fixed.const_data_ptr());
    int64_t head_bytes = 0;
    std::memcpy(&head_bytes, data, sizeof(head_bytes));
    TORCH_CHECK(head_bytes > 0, "the head of a message is empty");
    std::vector<std::byte> whole(data + sizeof(head_bytes), data + kFixedBytes);
    if (head_bytes > kRoom) {
      const at::Tensor rest = get(head_bytes - kRoom, label + ": rest of the head");
      const auto* more = static_cast<const std::byte*>(rest.const_data_ptr());
      whole.insert(whole.end(), more, more + rest.numel());
    }
    MessageHead head = MessageHead::read(
        {whole.data(),
         static_cast<size_t>(std::min<int64_t>(head_bytes, static_cast<int64_t>(whole.size())))});
    check_message(head, step, micro_batch, request_.name, pair_->rank_of());
    at::Tensor payload;
    if (head.payload_bytes > 0) payload = get(head.payload_bytes, label);
    auto* memory =
        payload.defined() ? static_cast<std::byte*>(payload.mutable_data_ptr()) : nullptr;
    return std::move(head).unpack(memory, [payload] {});
  }

  void done_with_one() override {}

 private:
  at::Tensor get(int64_t bytes, const std::string& label) {
    at::Tensor into =
        at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(pair_->device()));
    pair_->recv({into}, 0, label).wait();
    return into.cpu();
  }

  ChannelRequest request_;
  std::shared_ptr<Communicator> pair_;
};

}  // namespace

std::unique_ptr<TensorSender> make_engine_sender(ChannelRequest request,
                                                 std::shared_ptr<Communicator> pair) {
  return std::make_unique<EngineSender>(std::move(request), std::move(pair));
}

std::unique_ptr<TensorReceiver> make_engine_receiver(ChannelRequest request,
                                                     std::shared_ptr<Communicator> pair) {
  return std::make_unique<EngineReceiver>(std::move(request), std::move(pair));
}

}  // namespace trireme

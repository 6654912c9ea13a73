#include <trireme/comm/tensor_channel.h>

#include <trireme/comm/engine_channel.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/comm/memory_channel.h>
#include <trireme/common/error.h>
#include <trireme/shm/host_group.h>
#include <trireme/shm/segment.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

// Checks what ranks ask for, and that all ask for the same.
void check_requests(Communicator& communicator, const std::vector<ChannelRequest>& requests) {
  std::string text;
  for (const ChannelRequest& request : requests) {
    const bool is_channel = 0 <= request.from && request.from < communicator.world() &&
                            0 <= request.to && request.to < communicator.world() &&
                            request.from != request.to && request.slots > 0;
    text += c10::str(is_channel ? "" : "no channel: ", request.name, " from rank ", request.from,
                     " to rank ", request.to, " with ", request.slots, " slots; ");
  }
  const auto texts = gather_texts(text, communicator, communicator.device());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const size_t invalid = texts[rank].find("no channel: ");
    TORCH_CHECK_VALUE(
        invalid == std::string::npos,
        error_text("tensor_channel", "got " + texts[rank].substr(invalid), communicator.rank_of(),
                   "Ask for channels between two ranks, with a slot or more."));
    TORCH_CHECK_VALUE(
        texts[rank] == texts[0],
        error_text("tensor_channel",
                   "ranks ask for different channels: " + texts[0] + " on rank 0, and " +
                       texts[rank] + " on rank " + std::to_string(rank),
                   communicator.rank_of(), "Ask for the same on all ranks."));
  }
}

class Channels final : public TensorChannels {
 public:
  Channels(Communicator& communicator, const std::vector<ChannelRequest>& requests)
      : senders_(requests.size()), receivers_(requests.size()) {
    share_memory(communicator, requests);
    for (size_t i = 0; i < requests.size(); ++i) make_ends(communicator, requests[i], i);
  }

  TensorSender* sender(size_t index) override { return senders_.at(index).get(); }
  TensorReceiver* receiver(size_t index) override { return receivers_.at(index).get(); }

  void forget_before(int64_t step) override {
    for (ForgetfulReceiver* receiver : forgetful_) receiver->forget_before(step);
  }

 private:
  // Returns the place of a rank among those of this host, or -1.
  int64_t local(int64_t rank) const {
    if (host_ == nullptr) return -1;
    const auto& members = host_->group().members();
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : found - members.begin();
  }

  void share_memory(Communicator& communicator, const std::vector<ChannelRequest>& requests) {
    host_ = communicator.host();
    if (host_ == nullptr) return;
    int64_t bytes = 0;
    for (const ChannelRequest& request : requests) {
      offsets_.push_back(bytes);
      bytes += memory_channel_bytes(request);
    }
    if (bytes == 0) return;
    memory_ = host_->share_host_memory(bytes, "channels").memory.segment;
    if (!memory_) host_ = nullptr;
  }

  void make_ends(Communicator& communicator, const ChannelRequest& request, size_t index) {
    const int64_t own = communicator.rank();
    const bool sends = request.from == own;
    if (!sends && request.to != own) return;
    const int64_t peer = local(sends ? request.to : request.from);
    if (peer >= 0 && local(own) >= 0) {
      const MemoryChannelRequest end{request, memory_, memory_->data() + offsets_[index],
                                     &host_->group(), peer};
      if (sends) {
        senders_[index] = make_memory_sender(end);
      } else {
        auto receiver = make_memory_receiver(end);
        forgetful_.push_back(receiver.get());
        receivers_[index] = std::move(receiver);
      }
      return;
    }
    const auto pair =
        communicator.split({static_cast<int>(request.from), static_cast<int>(request.to)},
                           "channel " + std::to_string(index) + ", " + request.name);
    TORCH_CHECK(
        pair != nullptr,
        error_text("tensor_channel",
                   "the group cannot be split, expected a group of two ranks for " + request.name,
                   communicator.rank_of(), "Use backend=\"trireme\", Gloo or NCCL."));
    if (sends) {
      senders_[index] = make_engine_sender(request, pair);
    } else {
      receivers_[index] = make_engine_receiver(request, pair);
    }
  }

  Host* host_ = nullptr;
  std::shared_ptr<const shm::Segment> memory_;
  std::vector<int64_t> offsets_;
  std::vector<std::unique_ptr<TensorSender>> senders_;
  std::vector<std::unique_ptr<TensorReceiver>> receivers_;
  std::vector<ForgetfulReceiver*> forgetful_;
};

}  // namespace

std::unique_ptr<TensorChannels> make_channels(Communicator& communicator,
                                              std::vector<ChannelRequest> requests) {
  check_requests(communicator, requests);
  return std::make_unique<Channels>(communicator, requests);
}

}  // namespace trireme

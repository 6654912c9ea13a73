#include <trireme/comm/make_channels.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/comm/message_channel.h>
#include <trireme/comm/run_together.h>
#include <trireme/comm/shm_channel.h>
#include <trireme/shm/host_group.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kMostSlots = 1 << 20;
using Requests = std::vector<ChannelRequest>;

std::string text_of(const ChannelRequest& request) {
  return "a channel '" + request.name + "' from rank " + std::to_string(request.from) +
         " to rank " + std::to_string(request.to) + " for " + std::to_string(request.slots) +
         " messages";
}

// Compares what all ranks ask for. Returns a number that no earlier call over these ranks returned.
int64_t agree(Communicator& communicator, const Requests& requests) {
  static std::atomic<int64_t> made{0};
  std::string own = std::to_string(++made) + "\n";
  for (const ChannelRequest& request : requests) own += text_of(request) + "\n";
  int64_t number = 0;
  const auto texts = gather_texts(own, communicator, communicator.device());
  std::vector<std::string> lists;
  for (const std::string& text : texts) {
    number = std::max<int64_t>(number, std::stoll(text));
    lists.push_back(text.substr(text.find('\n') + 1));
  }
  if (const auto differs = first_difference(lists, "no further channel")) {
    TORCH_CHECK_VALUE(
        false, error_text(kChannelArea,
                          "ranks ask for different channels: rank 0 for " + differs->first +
                              ", rank " + std::to_string(differs->rank) + " for " + differs->other,
                          communicator.rank_of(), "Ask for the same channels on every rank."));
  }
  return number;
}

void check(const Requests& requests, RankOf where) {
  std::set<std::string> names;
  for (const ChannelRequest& request : requests) {
    const auto is_rank = [&](int64_t rank) { return rank >= 0 && rank < where.world; };
    TORCH_CHECK_VALUE(
        is_rank(request.from) && is_rank(request.to) && request.from != request.to,
        error_text(kChannelArea, "got " + text_of(request) + ", expected two ranks of the group",
                   where, "Pass two ranks from 0 to " + std::to_string(where.world - 1) + "."));
    TORCH_CHECK_VALUE(request.slots >= 1 && request.slots <= kMostSlots,
                      error_text(kChannelArea, "got " + text_of(request), where,
                                 "Ask for 1 to " + std::to_string(kMostSlots) + " messages."));
    TORCH_CHECK_VALUE(names.insert(request.name).second,
                      error_text(kChannelArea, "got two channels '" + request.name + "'", where,
                                 "Give each channel a name of its own."));
  }
}

// Where the memory of each request begins in that of its host; nothing for requests between
// different hosts.
struct HostPlan {
  std::vector<std::optional<int64_t>> offsets;
  int64_t bytes = 0;  // bytes of the host that needs most
};

HostPlan plan_of(const Requests& requests, Host* host) {
  HostPlan plan{std::vector<std::optional<int64_t>>(requests.size()), 0};
  if (host == nullptr) return plan;
  std::map<int64_t, size_t> host_of;
  const auto& hosts = host->group().hosts();
  for (size_t index = 0; index < hosts.size(); ++index)
    for (const int64_t rank : hosts[index]) host_of[rank] = index;
  std::vector<int64_t> bytes(hosts.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const size_t home = host_of.at(requests[i].from);
    if (home != host_of.at(requests[i].to)) continue;
    plan.offsets[i] = bytes[home];
    bytes[home] += shm::channel_bytes(requests[i].slots, requests[i].reserve_bytes);
    plan.bytes = std::max(plan.bytes, bytes[home]);
  }
  return plan;
}

class Channels final : public TensorChannels {
 public:
  Channels(Communicator& communicator, size_t count) : communicator_(communicator), ends_(count) {}

  TensorSender* sender(size_t index) override {
    const End& end = ends_.at(index);
    if (end.shm_sender) return end.shm_sender.get();
    return end.engine_sender.get();
  }
  TensorReceiver* receiver(size_t index) override {
    const End& end = ends_.at(index);
    if (end.shm_receiver) return end.shm_receiver.get();
    return end.engine_receiver.get();
  }

  void forget_before(int64_t step) override {
    for (End& end : ends_) {
      if (end.shm_receiver) end.shm_receiver->forget_before(step);
      if (end.engine_receiver) end.engine_receiver->forget_before(step);
    }
  }

  void connect_in_host(size_t index, const ChannelRequest& request, const HostMemory& memory,
                       int64_t offset) {
    shm::HostGroup& group = communicator_.host()->group();
    const auto& members = group.members();
    const auto place = [&](int64_t rank) {
      return std::find(members.begin(), members.end(), rank) - members.begin();
    };
    const auto& segment = memory.memory.segment;
    const auto end_towards = [&](int64_t rank) {
      return shm::ChannelEnd{place(rank), segment->data() + offset, request.slots,
                             request.spares_group, request.reserve_bytes};
    };
    const auto keeps = std::const_pointer_cast<shm::Segment>(segment);
    if (is_from(request))
      ends_[index].shm_sender = std::make_unique<ShmTensorSender>(group, end_towards(request.to),
                                                                  name_of(request), keeps);
    if (is_to(request))
      ends_[index].shm_receiver = std::make_unique<ShmTensorReceiver>(
          group, end_towards(request.from), name_of(request), keeps);
  }

  void connect_by_engine(size_t index, const ChannelRequest& request, int64_t number) {
    if (!is_from(request) && !is_to(request)) return;
    auto pair =
        communicator_.split({static_cast<int>(request.from), static_cast<int>(request.to)},
                            "channels/" + std::to_string(number) + "/" + std::to_string(index));
    if (!pair)
      C10_THROW_ERROR(NotImplementedError,
                      error_text(kChannelArea,
                                 "got " + text_of(request) +
                                     " over an engine that makes no groups of two ranks",
                                 communicator_.rank_of(), "Use Gloo, NCCL or shared memory."));
    End& end = ends_[index];
    if (is_from(request)) {
      end.engine_sender = std::make_unique<EngineTensorSender>(std::move(pair), name_of(request),
                                                               request.slots, request.most_bytes);
    } else {
      end.engine_receiver =
          std::make_unique<EngineTensorReceiver>(std::move(pair), name_of(request));
    }
  }

 private:
  struct End {
    std::unique_ptr<ShmTensorSender> shm_sender;
    std::unique_ptr<ShmTensorReceiver> shm_receiver;
    std::unique_ptr<EngineTensorSender> engine_sender;
    std::unique_ptr<EngineTensorReceiver> engine_receiver;
  };

  bool is_from(const ChannelRequest& request) const { return request.from == communicator_.rank(); }
  bool is_to(const ChannelRequest& request) const { return request.to == communicator_.rank(); }
  ChannelName name_of(const ChannelRequest& request) const {
    return {communicator_.rank_of(), is_from(request) ? request.to : request.from, request.name};
  }

  Communicator& communicator_;
  std::vector<End> ends_;
};

}  // namespace

std::unique_ptr<TensorChannels> make_channels(Communicator& communicator,
                                              std::vector<ChannelRequest> requests) {
  const RankOf where = communicator.rank_of();
  const int64_t number = agree(communicator, requests);
  check(requests, where);
  if (auto channels = communicator.own_channels(requests)) return channels;
  const HostPlan plan = plan_of(requests, communicator.host());
  HostMemory memory;
  if (plan.bytes > 0) {
    memory = communicator.host()->share_host_memory(plan.bytes, "channels");
    if (!memory.memory.segment)
      C10_THROW_ERROR(
          DistBackendError,
          error_text(kChannelArea, "got no memory for channels: " + memory.memory.why_not, where,
                     "Free memory on that host."));
  }
  auto channels = std::make_unique<Channels>(communicator, requests.size());
  // Connects in one order on all ranks, so that no two wait for each other crosswise.
  const auto failed = run_together(
      [&] {
        for (size_t i = 0; i < requests.size(); ++i) {
          const ChannelRequest& request = requests[i];
          if (!plan.offsets[i]) {
            channels->connect_by_engine(i, request, number);
          } else if (request.from == where.rank || request.to == where.rank) {
            channels->connect_in_host(i, request, memory, *plan.offsets[i]);
          }
        }
      },
      communicator, communicator.device());
  if (!failed) return channels;
  if (failed->own) std::rethrow_exception(failed->own);
  C10_THROW_ERROR(DistBackendError,
                  error_text(kChannelArea,
                             "could not connect channels: rank " + std::to_string(failed->rank) +
                                 " says: " + failed->text,
                             where, "See that rank."));
}

}  // namespace trireme

#include <trireme/comm/communicator.h>

#include <trireme/comm/tensor_channel.h>

#include <c10/util/Exception.h>

namespace trireme {
namespace {

[[noreturn]] void refuse_messages(const char* verb, RankOf where) {
  C10_THROW_ERROR(NotImplementedError,
                  error_text("comm",
                             std::string("got ") + verb +
                                 " over a communicator that moves no messages between two ranks",
                             where, "Use one that init() or make_communicator() returns."));
}

}  // namespace

Pending Communicator::send(std::vector<at::Tensor> /*tensors*/, int64_t /*to*/,
                           std::string /*label*/) {
  refuse_messages("send", rank_of());
}

Pending Communicator::recv(std::vector<at::Tensor> /*tensors*/, int64_t /*from*/,
                           std::string /*label*/) {
  refuse_messages("recv", rank_of());
}

std::unique_ptr<TensorChannels> Communicator::own_channels(
    const std::vector<ChannelRequest>& /*requests*/) {
  return nullptr;
}

std::string message_text(const char* verb, int64_t peer, const std::string& label, RankOf where) {
  const bool sends = std::string(verb) == "send";
  const std::string text =
      verb + (" of " + label) + (sends ? " to" : " from") + " rank " + std::to_string(peer);
  TORCH_CHECK_VALUE(
      peer >= 0 && peer < where.world && peer != where.rank,
      error_text("comm", "got a " + text + ", expected another rank of the group", where,
                 "Pass one from 0 to " + std::to_string(where.world - 1) + "."));
  return text;
}

}  // namespace trireme

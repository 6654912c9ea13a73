#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/error.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

class Host;             // host.h
struct GroupHealth;     // group_health.h
class TensorChannels;   // tensor_channel.h
struct ChannelRequest;  // tensor_channel.h

// The reductions of a collective. An average is not among them: grad/grad_reducer divides sums.
enum class ReduceOp : uint8_t { kSum, kMin, kMax };

// The operations that a strategy may ask of a group of ranks. Every verb takes a list of tensors
// (an engine coalesces what it can), is collective (all ranks of the group call it in the same
// order with the same shapes and dtypes), returns at once, and is finished by Pending::wait. The
// tensors stay alive as long as the Pending does. `label` names what is moved ("bucket 3:
// layer.1.weight .. layer.2.bias"); errors and traces repeat it.
//
// Failures: a verb, or the wait for it, throws c10::DistBackendError naming operation, label and
// rank; after that, or after a peer announced its failure, every further verb throws at once, until
// recover(). A group must be rebuilt if it cannot recover: any but ours of shared memory, and that
// one if a rank is gone or came too late.
//
// One thread at a time may use a Communicator.
class TRIREME_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual RankOf rank_of() const = 0;
  int64_t rank() const { return rank_of().rank; }
  int64_t world() const { return rank_of().world; }

  // Reduces in place. Takes dense tensors of any floating, complex or integral dtype; a sparse
  // tensor must be alone in its list.
  virtual Pending all_reduce(std::vector<at::Tensor> tensors, ReduceOp op, std::string label) = 0;

  // Writes in place: afterwards all ranks hold the values of `root`.
  virtual Pending broadcast(std::vector<at::Tensor> tensors, int64_t root, std::string label) = 0;

  // outputs[i] holds world x inputs[i].numel() elements, rank-major; both contiguous.
  virtual Pending all_gather(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                             std::string label) = 0;

  // inputs[i] holds world x outputs[i].numel() elements, rank-major; both contiguous.
  virtual Pending reduce_scatter(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                                 ReduceOp op, std::string label) = 0;

  // Send tensors to one other rank, and fill tensors with those that it sends: as many, of the same
  // sizes and dtypes. They are not collective: the two ranks call them, each in any place among its
  // other verbs. Messages of a pair of ranks come in the order in which they were sent, to recv()
  // in the order of its calls. Throw ValueError for a rank that is not another one of the group.
  // done() may stay false until wait() was called. A wait for a message that does not come raises
  // as a collective does. The default refuses: NotImplementedError.
  virtual Pending send(std::vector<at::Tensor> tensors, int64_t to, std::string label);
  virtual Pending recv(std::vector<at::Tensor> tensors, int64_t from, std::string label);

  // Returns whether reduce_scatter() may return only when all ranks have come, because a user's
  // verb in its place waits inside.
  virtual bool scatter_waits() const { return false; }

  virtual Pending barrier(std::string label) = 0;

  // Tells the other ranks, outside any collective, that this rank has left the sequence of
  // collectives, and why. Their waits raise with this text. Never throws; safe from a destructor.
  virtual void announce_failure(const std::string& reason) noexcept = 0;

  // Gives up what was in flight and makes the group work again, once every rank has announced a
  // failure or thrown because of one. Collective. Does nothing if no rank has, or if the group
  // cannot recover.
  virtual void recover() {}

  // Returns why this group can no longer be used; absent while it can.
  virtual std::optional<std::string> failure() const = 0;

  // Returns a communicator of `ranks`, this one among them, in that order, over the same engine;
  // null where it cannot be had. Every call with this `name` returns the same one, which lives as
  // long as this one. Collective over `ranks` the first time.
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& /*ranks*/,
                                              const std::string& /*name*/) {
    return nullptr;
  }

  // Returns channels over this communicator's own engine, for make_channels() (make_channels.h);
  // null if that is to build them on the memory of a host, or on messages.
  virtual std::unique_ptr<TensorChannels> own_channels(const std::vector<ChannelRequest>& requests);

  // Returns where this communicator moves texts (gather_texts.h) and numbers: on the CPU, or, if
  // the group takes no tensors of the CPU (NCCL alone), on the GPU that it is bound to, or else on
  // the caller's current one.
  virtual c10::Device device() const { return c10::kCPU; }

  // Shows peers that this rank has begun step `number`, or has done it, for messages of faults.
  // Never throws.
  virtual void show_step(int64_t /*number*/, bool /*is_done*/) noexcept {}

  // Returns the operations that only ranks sharing the memory of a host have; null if they share
  // none. It lives as long as the communicator.
  virtual Host* host() { return nullptr; }

  // Returns the state that all operations of the group share, for operations that go around the
  // verbs; null if there is none (in tests).
  virtual std::shared_ptr<GroupHealth> health() const { return nullptr; }
};

// Tells messages of communicators apart from those that a user sends by the same group.
inline constexpr int kMessageTag = 0x7215;

// Returns the name of a message of `verb`, "send" or "recv", in errors and traces: "send of
// activations to rank 1". Throws ValueError unless `peer` is another rank of the group.
TRIREME_API std::string message_text(const char* verb, int64_t peer, const std::string& label,
                                     RankOf where);

}  // namespace trireme

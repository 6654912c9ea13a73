#include <trireme/comm/c10d/c10d_communicator.h>

#include <trireme/comm/c10d/c10d_calls.h>
#include <trireme/comm/c10d/c10d_wait.h>
#include <trireme/comm/c10d/connection_watch.h>
#include <trireme/comm/c10d/group_device.h>
#include <trireme/comm/c10d/group_values.h>
#include <trireme/comm/c10d/message_wait.h>
#include <trireme/comm/c10d/split_group.h>
#include <trireme/comm/messages.h>
#include <trireme/comm/place_text.h>
#include <trireme/comm/reduce_op.h>
#include <trireme/comm/reduce_parts.h>
#include <trireme/comm/scratch.h>
#include <trireme/comm/shm_tensors.h>
#include <trireme/comm/subgroups.h>
#include <trireme/common/env.h>
#include <trireme/common/resolved.h>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;

// Returns the same memory in a type that every engine can move: complex numbers as pairs of reals.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// Returns the same memory as bytes, for verbs that only move: any dtype, bool and float8 too.
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.view({-1}).view(at::kByte); }

// Many tensors in one buffer, each at an offset that any dtype may be read from.
class FlatGroup {
 public:
  static constexpr int64_t kAlignBytes = 16;

  explicit FlatGroup(TensorList members) : members_(std::move(members)) {
    int64_t bytes = 0;
    for (const at::Tensor& member : members_) {
      offsets_.push_back(bytes);
      const auto member_bytes = static_cast<int64_t>(member.nbytes());
      bytes += (member_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    }
    buffer_ = at::empty({bytes}, members_.front().options().dtype(at::kByte));
  }

  at::Tensor bytes() const { return buffer_; }
  at::Tensor typed() const { return as_real(buffer_.view(members_.front().scalar_type())); }

  void copy_in() {
    // The gaps between members travel too; they must not carry what a sum could trap on.
    buffer_.zero_();
    for (size_t i = 0; i < members_.size(); ++i) place(i).copy_(members_[i]);
  }
  void copy_out() {
    for (size_t i = 0; i < members_.size(); ++i) members_[i].copy_(place(i));
  }

 private:
  at::Tensor place(size_t i) const {
    const at::Tensor& member = members_[i];
    return buffer_.narrow(0, offsets_[i], static_cast<int64_t>(member.nbytes()))
        .view(member.scalar_type())
        .view(member.sizes());
  }

  TensorList members_;
  std::vector<int64_t> offsets_;
  at::Tensor buffer_;
};

// Bounds the memory of a broadcast of a whole model.
constexpr int64_t kFlatGroupBytes = int64_t{64} << 20;

// Splits a list into runs that may share a buffer: one device (and dtype), each ending with the
// tensor that reaches kFlatGroupBytes.
std::vector<TensorList> split_by_buffer(const TensorList& tensors, bool by_dtype) {
  using Key = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Key, std::pair<TensorList, int64_t>> open;
  std::vector<TensorList> closed;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const Key key{tensor.device().type(), tensor.device().index(),
                  by_dtype ? tensor.scalar_type() : at::kByte};
    auto& [members, bytes] = open[key];
    members.push_back(tensor);
    bytes += static_cast<int64_t>(tensor.nbytes());
    if (bytes >= kFlatGroupBytes) {
      closed.push_back(std::move(members));
      open.erase(key);
    }
  }
  for (auto& [key, entry] : open) closed.push_back(std::move(entry.first));
  return closed;
}

// [Note: pieces over Gloo]
//
// Gloo gathers into a buffer of its own, from which it copies, and reduces by rings of small steps
// before it scatters. From 1 MiB on ranks get there two to three times faster, with a fifth of the
// CPU time, by broadcasts of their parts straight into the output, all at once; and by an exchange
// of parts that each rank then adds up itself, in rank order. Tensors below kSmallBytes travel in
// one buffer.
//
// Broadcasts from several roots run two at a time, so that of a link between hosts only one
// direction is busy, mostly: a gather of some MB takes twice as long. There each rank sends its
// part to all others at once, by an exchange.
//
// Gloo sends data when the receiver has said that its buffer is there, on the connection that
// carries the receiver's own data. Its exchange sends first: the rank that comes later says that it
// is ready behind all that it sends, and the other one's direction of the link lies idle for as
// long. So between hosts what goes to higher ranks and what goes to lower ones have connections of
// their own, on which nothing but such words goes the other way.
constexpr int64_t kSmallBytes = 64 * 1024;

// The works of one verb, in the order in which they were issued.
class WorkState final : public Pending::State {
 public:
  WorkState(std::shared_ptr<GroupHealth> health, AwaitedOperation operation)
      : health_(std::move(health)), operation_(std::move(operation)) {}

  void add(WorkPtr work, TensorList alive, std::function<void()> afterwards = {}) {
    const bool on_cpu = !alive.empty() && alive.front().is_cpu();
    if (on_cpu) stamp_completion(*work);
    parts_.push_back({std::move(work), std::move(alive), std::move(afterwards), on_cpu});
  }

  bool done() const override {
    for (const Part& part : parts_) {
      if (!part.work->isCompleted()) return false;
    }
    return true;
  }

  void wait() override {
    for (; next_ < parts_.size(); ++next_) {
      Part& part = parts_[next_];
      wait_for_work(*part.work, part.on_cpu, operation_, *health_);
      if (part.afterwards) part.afterwards();
    }
  }

  std::optional<Pending::Clock::time_point> finished_at() const override {
    const auto ticks = finished_->load(std::memory_order_acquire);
    if (ticks == 0) return std::nullopt;
    return Pending::Clock::time_point(Pending::Clock::duration(ticks));
  }

 private:
  struct Part {
    WorkPtr work;
    TensorList alive;
    std::function<void()> afterwards;
    bool on_cpu;
  };
  using Stamp = std::atomic<Pending::Clock::rep>;

  // Lets last_step() tell hidden from exposed communication. An engine without futures gives no
  // times.
  void stamp_completion(c10d::Work& work) {
    try {
      work.getFuture()->addCallback([stamp = finished_](c10::ivalue::Future&) {
        stamp->store(Pending::Clock::now().time_since_epoch().count(), std::memory_order_release);
      });
    } catch (const c10::Error&) {
    }
  }

  std::shared_ptr<GroupHealth> health_;
  AwaitedOperation operation_;
  std::vector<Part> parts_;
  size_t next_ = 0;
  std::shared_ptr<Stamp> finished_ = std::make_shared<Stamp>(0);
};

class C10dMessages final : public Messages {
 public:
  C10dMessages(std::shared_ptr<MessageWait> wait, AwaitedMessage message)
      : wait_(std::move(wait)), message_(std::move(message)) {}

 private:
  // On a device a wait orders streams and returns; the engine's watchdog holds the deadline.
  bool wait_until(c10d::Work& work, bool on_cpu, Pending::Clock::time_point deadline) override {
    return on_cpu ? wait_->wait_until(work, message_, deadline) : (work.wait(), true);
  }

  std::shared_ptr<MessageWait> wait_;
  AwaitedMessage message_;
};

// Returns what Gloo says of the connections of `group`.
std::shared_ptr<ConnectionWatch> watch_connections(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto post =
      [weak = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)](int64_t rank) -> WorkPtr {
    // torch's checks at this level count the receives of a rank among its collectives.
    if (c10d::debug_level() == c10d::DebugLevel::Detail) return {};
    const auto living = weak.lock();
    if (!living) return {};
    TensorList nothing{at::empty({1}, at::kByte)};
    return living->recv(nothing, static_cast<int>(rank), kMessageTag + kUnansweredTagOffset);
  };
  return std::make_shared<ConnectionWatch>(post);
}

// How long Gloo may take over what it received before a connection broke.
constexpr std::chrono::seconds kForLastSteps{1};

// Returns why collectives of the group may be waited for in vain: the connection to a rank has
// broken. One that has left in order may have done its part of them, unless it is the only peer.
std::string why_peer_lost(ConnectionWatch& connections, const GroupHealth& health) {
  for (int64_t rank = 0; rank < health.where.world; ++rank) {
    if (rank == health.where.rank) continue;
    const std::string why = connections.why_broken(rank, kForLastSteps);
    if (!why.empty() && (health.where.world == 2 || health.board.has_left_no_word(rank)))
      return "the connection to rank " + std::to_string(rank) + " has broken: " + why;
  }
  return {};
}

bool is_fake(c10d::ProcessGroup& group, c10::DeviceType device) {
  return group.hasBackends() && group.getBackend(device)->getBackendName() == "fake";
}

class C10dCommunicator final : public Communicator {
 public:
  explicit C10dCommunicator(C10dRequest request)
      : group_(std::move(request.group)),
        where_{group_->getRank(), group_->getSize()},
        health_(std::make_shared<GroupHealth>(std::move(request.store), where_)),
        only_device_(only_device_of(*group_)),
        is_gloo_(request.is_gloo),
        connections_(is_gloo_ ? watch_connections(group_) : nullptr),
        make_of_part_(request.make_of_part) {
    health_->is_fake = is_fake(*group_, only_device_.value_or(c10::kCPU).type());
    // A group that connects two ranks when they first meet would try to connect to one that is
    // gone.
    if (connections_ && !lookup_process_environment("TORCH_GLOO_LAZY_INIT"))
      health_->find_lost_peer = [connections = connections_, health = health_.get()] {
        return why_peer_lost(*connections, *health);
      };
  }

  // torch's Gloo ends only when its last operation has, for which a rank that has failed may never
  // come: nobody waits for the end of a failed group.
  ~C10dCommunicator() override {
    if (connections_) connections_->forget();
    if (!health_->failure()) return;
    try {
      std::thread([groups = std::pair(std::move(group_), std::move(downward_))]() mutable {
        groups = {};
      }).detach();
    } catch (const std::system_error&) {  // no thread: it has ended here
    }
  }

  RankOf rank_of() const override { return where_; }

  Pending all_reduce(TensorList tensors, ReduceOp op, std::string label) override {
    auto state = begin("all_reduce", label);
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    if (tensors.size() == 1 && (tensors[0].is_sparse() || lies_plain(tensors[0]))) {
      TensorList arguments{as_real(tensors[0])};
      add(*state, [&] { return group_->allreduce(arguments, options); }, arguments);
      return Pending(std::move(state));
    }
    for (TensorList& run : split_by_buffer(tensors, /*by_dtype=*/true)) {
      auto flat = std::make_shared<FlatGroup>(std::move(run));
      flat->copy_in();
      TensorList arguments{flat->typed()};
      add(
          *state, [&] { return group_->allreduce(arguments, options); }, arguments,
          [flat] { flat->copy_out(); });
    }
    return Pending(std::move(state));
  }

  Pending broadcast(TensorList tensors, int64_t root, std::string label) override {
    auto state = begin("broadcast", label);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    if (tensors.size() == 1 && lies_plain(tensors[0]) && tensors[0].numel() > 0) {
      TensorList arguments{as_bytes(tensors[0])};
      add(*state, [&] { return group_->broadcast(arguments, options); }, arguments);
      return Pending(std::move(state));
    }
    for (TensorList& run : split_by_buffer(tensors, /*by_dtype=*/false)) {
      auto flat = std::make_shared<FlatGroup>(std::move(run));
      const bool is_root = where_.rank == root;
      if (is_root) flat->copy_in();
      TensorList arguments{flat->bytes()};
      std::function<void()> afterwards;
      if (!is_root) afterwards = [flat] { flat->copy_out(); };
      add(*state, [&] { return group_->broadcast(arguments, options); }, arguments, afterwards);
    }
    return Pending(std::move(state));
  }

  Pending all_gather(TensorList outputs, TensorList inputs, std::string label) override {
    auto state = begin("all_gather", label);
    for (size_t i = 0; i < inputs.size(); ++i) {
      outputs[i] = as_bytes(outputs[i]);
      inputs[i] = as_bytes(resolved(inputs[i]));
    }
    if (sends_in_pieces(inputs)) {
      gather_in_pieces(*state, std::move(outputs), std::move(inputs));
    } else if (inputs.size() > 1 && !inputs.front().is_cpu()) {
      add(*state, [&] { return all_gather_flat_list(*group_, outputs, inputs); }, outputs);
    } else {
      for (size_t i = 0; i < inputs.size(); ++i) gather_flat(*state, outputs[i], inputs[i]);
    }
    return Pending(std::move(state));
  }

  Pending reduce_scatter(TensorList outputs, TensorList inputs, ReduceOp op,
                         std::string label) override {
    auto state = begin("reduce_scatter", label);
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    const bool in_pieces = sends_in_pieces(inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      at::Tensor output = as_real(outputs[i]).view({-1});
      at::Tensor input = as_real(resolved(inputs[i])).view({-1});
      if (in_pieces && !is_bytes(shm_dtype(output.scalar_type()))) {
        scatter_in_pieces(*state, output, input, op);
      } else {
        add(*state, [&] { return reduce_scatter_flat(*group_, output, input, options); },
            {output, input});
      }
    }
    return Pending(std::move(state));
  }

  Pending send(TensorList tensors, int64_t to, std::string label) override {
    auto messages = begin_messages({message_text("send", to, label, where_), to});
    messages->send(tensors, [&](const at::Tensor& moved) {
      return issue_message(moved, [&](TensorList& bytes) {
        return group_->send(bytes, static_cast<int>(to), kMessageTag);
      });
    });
    return Pending(std::move(messages));
  }

  Pending recv(TensorList tensors, int64_t from, std::string label) override {
    auto messages = begin_messages({message_text("recv", from, label, where_), from});
    messages->recv(tensors, [&](const at::Tensor& moved) {
      return issue_message(moved, [&](TensorList& bytes) {
        return group_->recv(bytes, static_cast<int>(from), kMessageTag);
      });
    });
    return Pending(std::move(messages));
  }

  // Runs on the CPU's engine if there is one, as only its work may be waited for in slices: NCCL
  // ends its communicators when such a wait is over.
  Pending barrier(std::string label) override {
    auto state = begin("barrier", label);
    c10d::BarrierOptions options;
    if (group_->hasBackends() && !only_device_) options.device = c10::kCPU;
    add(
        *state, [&] { return group_->barrier(options); },
        only_device_ ? TensorList{} : TensorList{at::empty({0})});
    return Pending(std::move(state));
  }

  void announce_failure(const std::string& reason) noexcept override {
    health_->board.announce(reason);
    health_->set_failure(reason);
  }

  std::optional<std::string> failure() const override { return health_->failure(); }

  void show_step(int64_t number, bool is_done) noexcept override {
    health_->board.note_step(number, is_done);
  }

  std::shared_ptr<GroupHealth> health() const override { return health_; }

  c10::Device device() const override {
    if (!only_device_) return c10::kCPU;
    if (only_device_->has_index()) return *only_device_;
    return c10::impl::VirtualGuardImpl(only_device_->type()).getDevice();
  }

  std::shared_ptr<Communicator> split(const std::vector<int>& ranks,
                                      const std::string& name) override {
    std::shared_ptr<Communicator>& made = parts_[name];
    if (!made) {
      const auto group = split_group(group_, ranks, name);
      if (group) {
        made = make_of_part_(group, group->getStore());
        share_steps(*this, *made);
        if (const auto part = made->health()) part->whole = health_;
      }
    }
    return made;
  }

 private:
  void begin(std::string operation) {
    health_->check_usable(operation);
    health_->board.note_started(operation);
    operation_ = std::move(operation);
  }

  std::unique_ptr<WorkState> begin(const char* verb, const std::string& label) {
    begin(verb + (" of " + label));
    return std::make_unique<WorkState>(health_,
                                       AwaitedOperation{operation_, health_->progress().start()});
  }

  std::unique_ptr<Messages> begin_messages(AwaitedMessage message) {
    begin(message.operation);
    if (!messages_) messages_ = std::make_shared<MessageWait>(health_, connections_);
    return std::make_unique<C10dMessages>(messages_, std::move(message));
  }

  template <typename Issue>
  WorkPtr issue_message(const at::Tensor& moved, Issue issue) {
    TensorList bytes{as_bytes(moved)};
    WorkPtr work;
    rethrow_named(operation_, *health_, [&] { work = issue(bytes); });
    return work;
  }

  // Engines may also fail at once, in the call itself.
  template <typename Issue>
  void add(WorkState& state, Issue issue, TensorList alive, std::function<void()> afterwards = {}) {
    WorkPtr work;
    rethrow_named(operation_, *health_, [&] { work = issue(); });
    state.add(std::move(work), std::move(alive), std::move(afterwards));
  }

  // See [Note: pieces over Gloo].
  bool sends_in_pieces(const TensorList& inputs) const {
    return is_gloo_ && !inputs.empty() && inputs.front().is_cpu();
  }

  void gather_flat(WorkState& state, at::Tensor output, at::Tensor input) {
    add(state, [&] { return all_gather_flat(*group_, output, input); }, {output, input});
  }

  void gather_in_pieces(WorkState& state, TensorList outputs, TensorList inputs) {
    TensorList small_outputs;
    TensorList small_inputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].numel() < kSmallBytes) {
        small_outputs.push_back(outputs[i]);
        small_inputs.push_back(inputs[i]);
        continue;
      }
      if (!are_near()) {
        gather_by_exchange(state, outputs[i], inputs[i]);
        continue;
      }
      const std::vector<at::Tensor> parts = outputs[i].chunk(where_.world);
      at::Tensor own = parts[static_cast<size_t>(where_.rank)];
      if (own.data_ptr() != inputs[i].data_ptr()) own.copy_(inputs[i]);
      c10d::BroadcastOptions options;
      for (options.rootRank = 0; options.rootRank < where_.world; ++options.rootRank) {
        TensorList part{parts[static_cast<size_t>(options.rootRank)]};
        add(state, [&] { return group_->broadcast(part, options); }, part);
      }
    }
    if (small_inputs.size() == 1) return gather_flat(state, small_outputs[0], small_inputs[0]);
    if (small_inputs.empty()) return;
    at::Tensor input = at::cat(small_inputs);
    at::Tensor output = at::empty({where_.world, input.numel()}, input.options());
    at::Tensor flat = output.view({-1});
    add(
        state, [&] { return all_gather_flat(*group_, flat, input); }, {flat, input},
        [output, places = std::move(small_outputs), world = where_.world] {
          int64_t offset = 0;
          for (const at::Tensor& place : places) {
            const int64_t bytes = place.numel() / world;
            place.view({world, bytes}).copy_(output.narrow(1, offset, bytes));
            offset += bytes;
          }
        });
  }

  void gather_by_exchange(WorkState& state, at::Tensor output, const at::Tensor& input) {
    at::Tensor sent = scratch_.take_buffer(output.numel());
    sent.view({where_.world, -1}).copy_(input.view({1, -1}));
    exchange(state, output, sent);
  }

  // Returns whether messages of these ranks cross no link between hosts. Collective the first time
  // that anyone asks for the group.
  bool are_near() {
    if (are_near_) return *are_near_;
    static GroupValues<std::optional<bool>> known;
    are_near_ = known.with(group_, [](const std::optional<bool>& near) { return near; });
    if (!are_near_) are_near_ = look_who_is_near();
    known.with(group_, [this](std::optional<bool>& near) { return near = are_near_; });
    if (!*are_near_) rethrow_named(operation_, *health_, [&] { downward_ = group_like_this(); });
    return *are_near_;
  }

  bool look_who_is_near() {
    const auto hash = static_cast<int64_t>(std::hash<std::string>()(place_text()));
    at::Tensor own = at::full({1}, hash, at::kLong);
    at::Tensor of_all = at::empty({where_.world}, at::kLong);
    rethrow_named(operation_, *health_, [&] { all_gather_flat(*group_, of_all, own)->wait(); });
    return of_all.eq(hash).all().item<bool>();
  }

  // Makes a group of the same ranks on the CPU; null if the engine can make none. Collective.
  c10::intrusive_ptr<c10d::ProcessGroup> group_like_this() {
    std::vector<int> ranks(static_cast<size_t>(where_.world));
    std::iota(ranks.begin(), ranks.end(), 0);
    return split_group(group_, ranks, "downward", c10::kCPU);
  }

  // Sends part r of `input` to rank r, and receives its part for this rank as part r of `output`;
  // then calls `afterwards`.
  void exchange(WorkState& state, at::Tensor output, at::Tensor input,
                std::function<void()> afterwards = {}) {
    if (are_near() || !downward_) {
      add(
          state, [&] { return all_to_all_flat(*group_, output, input); }, {output, input},
          std::move(afterwards));
      return;
    }
    const int64_t part = input.numel() / where_.world;
    const int64_t own = where_.rank * part;
    output.narrow(0, own, part).copy_(input.narrow(0, own, part));
    const auto of_lower = [&](const at::Tensor& all) { return all.narrow(0, 0, own); };
    const auto of_higher = [&](const at::Tensor& all) { return all.slice(0, own + part); };
    const auto splits = [&](int64_t of_each_lower, int64_t of_each_higher) {
      Splits numels(static_cast<size_t>(where_.world), of_each_higher);
      std::fill_n(numels.begin(), where_.rank, of_each_lower);
      numels[static_cast<size_t>(where_.rank)] = 0;
      return numels;
    };
    TensorList up{of_lower(output), of_higher(input)};
    TensorList down{of_higher(output), of_lower(input)};
    add(
        state,
        [&] { return all_to_all_flat(*group_, up[0], up[1], splits(part, 0), splits(0, part)); },
        up);
    add(
        state,
        [&] {
          return all_to_all_flat(*downward_, down[0], down[1], splits(0, part), splits(part, 0));
        },
        down, std::move(afterwards));
  }

  void scatter_in_pieces(WorkState& state, at::Tensor output, at::Tensor input, ReduceOp op) {
    at::Tensor sent = as_bytes(input);
    at::Tensor received = scratch_.take_buffer(sent.numel());
    const auto add_up = [output, received, op, world = where_.world] {
      reduce_parts(output, received, op, world);
    };
    exchange(state, received, sent, add_up);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  // Carries what an exchange between hosts sends to lower ranks.
  c10::intrusive_ptr<c10d::ProcessGroup> downward_ = {};
  RankOf where_;
  std::shared_ptr<GroupHealth> health_;
  std::optional<c10::Device> only_device_;
  bool is_gloo_;                                  // on CPU
  std::shared_ptr<ConnectionWatch> connections_;  // null for another engine than Gloo
  MakeCommunicator* make_of_part_;
  Scratch scratch_;
  std::optional<bool> are_near_ = {};
  std::shared_ptr<MessageWait> messages_;
  std::string operation_;                                       // the one being issued
  std::map<std::string, std::shared_ptr<Communicator>> parts_;  // key: the name they were split by
};

}  // namespace

std::shared_ptr<Communicator> make_c10d_communicator(C10dRequest request) {
  return std::make_shared<C10dCommunicator>(std::move(request));
}

}  // namespace trireme

#include <trireme/activation/partition.h>

#include <trireme/activation/partitioned_input.h>
#include <trireme/activation/shared_arena.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/host.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/fork_guard.h>
#include <trireme/memory/flat_buffer.h>
#include <trireme/shm/host_group.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme {
namespace {

using TensorList = std::vector<at::Tensor>;
using PackedList = std::vector<c10::intrusive_ptr<PackedSavedTensor>>;

// The operation for which a rank meets the others; the ranks compare it.
enum Phase : int64_t { kPacks = 1, kCompares = 2, kGathers = 3, kDiffers = 4 };
constexpr size_t kHashes = 16;  // the last one covers all further tensors

// One rank's row of the table of integers that all ranks get when they meet.
struct Header {
  int64_t phase = 0;
  int64_t what = 0;  // equal on all ranks
  int64_t known = 0;
  int64_t number = 0;  // counts packings
  int64_t value = 0;
  SharedArena::Place place = {};  // rank 0's counts
  std::array<int64_t, kHashes> hashes = {};
};
constexpr int64_t kHeaderWords = sizeof(Header) / sizeof(int64_t);
static_assert(sizeof(Header) % sizeof(int64_t) == 0);
using Table = std::vector<Header>;  // one for each rank

uint64_t mixed(uint64_t hash, uint64_t word) { return (hash ^ word) * 0x100000001b3; }

int64_t hash_of_text(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) hash = mixed(hash, static_cast<unsigned char>(letter));
  return static_cast<int64_t>(hash);
}

// Returns whether a field has the same value on all ranks.
template <typename Value>
bool is_common(const Table& table, Value Header::* which) {
  return std::all_of(table.begin(), table.end(),
                     [&](const Header& words) { return words.*which == table.front().*which; });
}

int64_t padded_bytes(const at::Tensor& tensor) {
  constexpr int64_t kLine = 64;
  return (static_cast<int64_t>(tensor.nbytes()) + kLine - 1) / kLine * kLine;
}

// An input kept in memory that all ranks of the host read.
class SharedInput final : public PartitionedInput {
 public:
  SharedInput(const at::Tensor& input, InputOrigin origin, RankOf where,
              std::shared_ptr<KeptBytes> kept, std::shared_ptr<SharedArena::Block> block,
              std::byte* data)
      : PartitionedInput(input, std::move(origin), where, std::move(kept)),
        block_(std::move(block)),
        data_(data) {
    count(&KeptBytes::shared, static_cast<int64_t>(input.nbytes()));
  }

 private:
  at::Tensor restore() override {
    return at::from_blob(
        data_, sizes(), strides(), [block = block_](void*) {}, at::TensorOptions().dtype(dtype()));
  }
  void drop() override { block_.reset(); }

  std::shared_ptr<SharedArena::Block> block_;
  std::byte* data_;
};

class PartitionGroup;

// An input cut into one slice per rank, of which each rank keeps its own.
class SlicedInput final : public PartitionedInput {
 public:
  SlicedInput(const at::Tensor& input, InputOrigin origin, RankOf where,
              std::shared_ptr<KeptBytes> kept, std::shared_ptr<PartitionGroup> group,
              int64_t number)
      : PartitionedInput(input, std::move(origin), where, std::move(kept)),
        group_(std::move(group)),
        number_(number) {
    const int64_t numel = (input.numel() + where.world - 1) / where.world;
    slice_ = at::empty({numel}, at::TensorOptions().dtype(dtype()).device(input.device()));
    const int64_t begin = std::min(where.rank * numel, input.numel());
    const int64_t own = std::min(numel, input.numel() - begin);
    slice_.narrow(0, 0, own).copy_(flat_view(input).narrow(0, begin, own));
    count(&KeptBytes::slices, static_cast<int64_t>(slice_.nbytes()));
  }

  int64_t number() const { return number_; }
  const at::Tensor& slice() const { return slice_; }

 private:
  at::Tensor restore() override;
  void drop() override;

  std::shared_ptr<PartitionGroup> group_;
  int64_t number_;  // ranks agree about it
  at::Tensor slice_;
};

// The inputs of one checkpoint, and their packing so far.
struct Batch {
  const TensorList& inputs;
  std::shared_ptr<const std::string> function;
  std::string text = {};            // must be equal on all ranks
  std::vector<size_t> chosen = {};  // inputs that are partitioned
  PackedList packed = {};           // one for each input
  uint64_t known = 0;               // hash of the reused packings

  std::string name() const { return "the inputs of " + *function + " for partition="; }
  // Returns the chosen inputs that are not packed yet: those on the CPU, or those on other devices.
  std::vector<size_t> left(bool is_cpu) const {
    std::vector<size_t> found;
    for (const size_t i : chosen)
      if (!packed[i] && inputs[i].is_cpu() == is_cpu) found.push_back(i);
    return found;
  }
};

// The packer's state, which it shares with the slices that it has made.
class PartitionGroup : public std::enable_shared_from_this<PartitionGroup> {
 public:
  explicit PartitionGroup(std::shared_ptr<Communicator> given);

  PackedList pack(const TensorList& inputs, const std::string& function);
  at::Tensor gather(const SlicedInput& input);
  PartitionMemory memory() const;

 private:
  // The packing of a tensor that may come again: a mask, say, that every block gets.
  struct Packed {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    c10::weak_intrusive_ptr<PackedSavedTensor> packed;
    uint64_t number;  // ranks agree about it
  };

  template <typename Work>
  auto together(const std::string& name, const Work& work);
  static Batch look_at(const TensorList& inputs, const std::string& function);
  void take_known(Batch& batch);
  void pack_all(Batch& batch);
  void share(Batch& batch, const std::vector<size_t>& which,
             const std::shared_ptr<SharedArena::Block>& block);
  std::optional<size_t> write_and_compare(const Batch& batch, const std::vector<size_t>& which,
                                          std::byte* data);
  void remember(const Batch& batch);
  Table meet(Header own, const std::string& phase);
  [[noreturn]] void differ(const Batch& batch, const std::vector<size_t>& among);

  RankOf where() const { return communicator_->rank_of(); }

  std::shared_ptr<Communicator> given_;  // outlives the split communicator
  std::shared_ptr<Communicator> communicator_;
  mutable std::mutex mutex_;
  bool shares_memory_ = false;
  bool is_broken_ = false;
  int64_t number_ = 0;  // counts packings; equal on all ranks after each meeting
  std::unique_ptr<SharedArena> arena_;
  std::vector<Packed> remembered_;
  std::shared_ptr<KeptBytes> kept_ = std::make_shared<KeptBytes>();
  ForkGuard fork_guard_;
};

at::Tensor SlicedInput::restore() {
  return range_of(group_->gather(*this), sizes(), strides(), /*offset=*/0);
}

void SlicedInput::drop() {
  slice_.reset();
  group_.reset();
}

PartitionGroup::PartitionGroup(std::shared_ptr<Communicator> given) : given_(std::move(given)) {
  if (given_->world() > 1) {
    std::vector<int> ranks(static_cast<size_t>(given_->world()));
    std::iota(ranks.begin(), ranks.end(), 0);
    communicator_ = given_->split(ranks, "partition");
  }
  if (!communicator_) communicator_ = given_;
  Host* host = communicator_->host();
  shares_memory_ = host != nullptr && host->group().world() == communicator_->world();
}

// Runs a collective exchange. A rank that throws tells the others, unless all ranks throw.
template <typename Work>
auto PartitionGroup::together(const std::string& name, const Work& work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!fork_guard_.in_child(),
              error_text("checkpoint",
                         "got " + name + " in a forked child of the process that made the packer",
                         where(), "Use partition= in the parent only."));
  const at::NoGradGuard no_grad;
  try {
    if (is_broken_) {
      // The exchange may have ended on some ranks only, which would disagree about free memory.
      arena_.reset();
      communicator_->recover();
      is_broken_ = false;
    }
    return work();
  } catch (const c10::ValueError&) {  // thrown on all ranks
    throw;
  } catch (...) {
    is_broken_ = true;
    communicator_->announce_failure(
        error_text("checkpoint", name + " failed: " + text_of(std::current_exception()), where(),
                   "Look for the error of that rank."));
    throw;
  }
}

PackedList PartitionGroup::pack(const TensorList& inputs, const std::string& function) {
  if (communicator_->world() == 1) return PackedList(inputs.size());
  Batch batch = look_at(inputs, function);
  together(batch.name(), [&] { pack_all(batch); });
  return std::move(batch.packed);
}

Batch PartitionGroup::look_at(const TensorList& inputs, const std::string& function) {
  Batch batch{inputs, std::make_shared<const std::string>(
                          function.empty() ? std::string("the function") : function)};
  batch.packed.resize(inputs.size());
  batch.text = *batch.function + "(";
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_chosen = is_partitioned(inputs[i]);
    if (is_chosen) batch.chosen.push_back(i);
    batch.text += (i > 0 ? ", " : "") + (is_chosen ? text_of_tensor(inputs[i]) : "-");
  }
  batch.text += ")";
  return batch;
}

// Reuses earlier packings of the same tensors, if these were not changed since.
void PartitionGroup::take_known(Batch& batch) {
  std::erase_if(remembered_, [](const Packed& entry) {
    return entry.tensor.expired() || entry.packed.expired();
  });
  for (const size_t i : batch.chosen) {
    const auto* tensor = batch.inputs[i].unsafeGetTensorImpl();
    const auto found = std::find_if(
        remembered_.begin(), remembered_.end(),
        [&](const Packed& entry) { return entry.tensor._unsafe_get_target() == tensor; });
    auto packed = found == remembered_.end() ? nullptr : found->packed.lock();
    const bool holds = packed && static_cast<PartitionedInput&>(*packed).holds(batch.inputs[i]);
    batch.known = mixed(batch.known, holds ? found->number : 0);
    if (holds) batch.packed[i] = std::move(packed);
  }
}

// Ranks meet until they agree which inputs are new and where these go; mostly they do at once.
void PartitionGroup::pack_all(Batch& batch) {
  if (shares_memory_ && !arena_) arena_ = std::make_unique<SharedArena>(*communicator_);
  take_known(batch);
  std::vector<size_t> sliced;
  for (bool has_room = shares_memory_;;) {
    const std::vector<size_t> shared = batch.left(/*is_cpu=*/true);
    sliced = batch.left(/*is_cpu=*/false);
    if (!has_room) sliced.insert(sliced.end(), shared.begin(), shared.end());
    Header own{kPacks, hash_of_text(batch.text), static_cast<int64_t>(batch.known), number_};
    if (has_room && !shared.empty() && where().rank == 0) {
      int64_t bytes = 0;
      for (const size_t i : shared) bytes += padded_bytes(batch.inputs[i]);
      own.place = arena_->find_place(bytes);
    }
    for (size_t k = 0; k < sliced.size(); ++k) {
      int64_t& hash = own.hashes[std::min(k, kHashes - 1)];
      hash =
          static_cast<int64_t>(mixed(static_cast<uint64_t>(hash),
                                     static_cast<uint64_t>(hash_of_bits(batch.inputs[sliced[k]]))));
    }
    const Table table = meet(own, "checkpoints " + batch.text);
    for (const Header& words : table) number_ = std::max(number_, words.number);
    ++number_;
    if (!is_common(table, &Header::known)) {  // a rank has already freed a reused packing
      batch.packed.assign(batch.inputs.size(), nullptr);
      batch.known = 0;
      continue;
    }
    if (!is_common(table, &Header::hashes)) differ(batch, sliced);
    const SharedArena::Place& place = table.front().place;
    if (place.bytes == 0) break;
    const auto block = arena_->take(place, static_cast<uint64_t>(number_), batch.name());
    has_room = block != nullptr;
    if (!has_room) continue;
    share(batch, shared, block);
    break;
  }
  for (const size_t i : sliced) {
    batch.packed[i] =
        c10::make_intrusive<SlicedInput>(batch.inputs[i], InputOrigin{batch.function, i}, where(),
                                         kept_, shared_from_this(), number_);
  }
  remember(batch);
}

void PartitionGroup::share(Batch& batch, const std::vector<size_t>& which,
                           const std::shared_ptr<SharedArena::Block>& block) {
  const std::optional<size_t> differing = write_and_compare(batch, which, block->data());
  Header own{kCompares, hash_of_text(batch.text), 0, number_};
  own.value = differing ? static_cast<int64_t>(*differing) + 1 : 0;
  const Table table = meet(own, "compares " + batch.text);
  for (const size_t i : which)
    for (const Header& words : table)
      if (words.value == static_cast<int64_t>(i) + 1) differ(batch, {i});
  std::byte* data = block->data();
  for (const size_t i : which) {
    batch.packed[i] = c10::make_intrusive<SharedInput>(
        batch.inputs[i], InputOrigin{batch.function, i}, where(), kept_, block, data);
    data += padded_bytes(batch.inputs[i]);
  }
}

// Writes this rank's part, then compares the whole. Returns the first input that differs.
std::optional<size_t> PartitionGroup::write_and_compare(const Batch& batch,
                                                        const std::vector<size_t>& which,
                                                        std::byte* data) {
  const auto [rank, world] = where();
  std::byte* place = data;
  for (const size_t i : which) {
    const auto* own = static_cast<const std::byte*>(batch.inputs[i].const_data_ptr());
    const auto bytes = static_cast<int64_t>(batch.inputs[i].nbytes());
    const int64_t begin = bytes * rank / world;
    const int64_t end = bytes * (rank + 1) / world;
    std::memcpy(place + begin, own + begin, static_cast<size_t>(end - begin));
    place += padded_bytes(batch.inputs[i]);
  }
  communicator_->barrier(batch.name()).wait();
  for (const size_t i : which) {
    if (std::memcmp(data, batch.inputs[i].const_data_ptr(), batch.inputs[i].nbytes()) != 0)
      return i;
    data += padded_bytes(batch.inputs[i]);
  }
  return std::nullopt;
}

void PartitionGroup::remember(const Batch& batch) {
  for (const size_t i : batch.chosen) {
    const at::Tensor& input = batch.inputs[i];
    const auto is_it = [&](const Packed& entry) {
      return entry.tensor._unsafe_get_target() == input.unsafeGetTensorImpl();
    };
    const auto found = std::find_if(remembered_.begin(), remembered_.end(), is_it);
    if (found != remembered_.end()) {
      if (found->packed._unsafe_get_target() == batch.packed[i].get()) continue;
      remembered_.erase(found);
    }
    remembered_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                               input.getIntrusivePtr()),
                           c10::weak_intrusive_ptr<PackedSavedTensor>(batch.packed[i]),
                           mixed(static_cast<uint64_t>(number_), i + 1)});
  }
}

at::Tensor PartitionGroup::gather(const SlicedInput& input) {
  const std::string text = input.text();
  return together("the gather of " + text, [&] {
    meet({kGathers, hash_of_text(text + " " + std::to_string(input.number()))},
         "recomputes from " + text + " of its packing " + std::to_string(input.number()));
    const at::Tensor& slice = input.slice();
    at::Tensor whole = at::empty({slice.numel() * where().world}, slice.options());
    communicator_->all_gather({whole}, {slice}, text).wait();
    return whole;
  });
}

PartitionMemory PartitionGroup::memory() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {kept_->inputs, kept_->shared, kept_->slices, arena_ ? arena_->bytes() : 0};
}

// Gathers the words of all ranks. Throws on all of them if they do different things.
Table PartitionGroup::meet(Header own, const std::string& phase) {
  at::Tensor mine = at::empty({kHeaderWords}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof(Header));
  mine = mine.to(communicator_->device());
  at::Tensor all = at::empty({where().world * kHeaderWords}, mine.options());
  communicator_->all_gather({all}, {mine}, "what ranks bring to partition=").wait();
  all = all.cpu();
  Table table(static_cast<size_t>(where().world));
  std::memcpy(table.data(), all.const_data_ptr(), all.nbytes());
  if (is_common(table, &Header::phase) && is_common(table, &Header::what)) return table;
  std::string texts;
  const std::vector<std::string> deeds =
      gather_texts(phase, *communicator_, communicator_->device());
  for (size_t rank = 0; rank < deeds.size(); ++rank)
    texts += (rank > 0 ? "; rank " : "rank ") + std::to_string(rank) + " " + deeds[rank];
  C10_THROW_ERROR(
      ValueError,
      error_text("checkpoint", "ranks of partition= do different things: " + texts, where(),
                 "Let all of them run the same checkpoints and backwards in one order, "
                 "on inputs of equal sizes and dtypes."));
}

void PartitionGroup::differ(const Batch& batch, const std::vector<size_t>& among) {
  size_t input = among.front();
  size_t rank = 0;
  for (const size_t i : among) {
    Header own{kDiffers, static_cast<int64_t>(i)};
    own.value = hash_of_bits(batch.inputs[i]);
    const Table table = meet(own, "has found a difference");
    const auto other = std::find_if(table.begin(), table.end(), [&](const Header& words) {
      return words.value != table.front().value;
    });
    if (other == table.end()) continue;
    input = i;
    rank = static_cast<size_t>(other - table.begin());
    break;
  }
  C10_THROW_ERROR(
      ValueError,
      error_text("checkpoint",
                 InputOrigin{batch.function, input}.text(text_of_tensor(batch.inputs[input])) +
                     " differs between ranks of partition=: rank " + std::to_string(rank) +
                     " has other values than rank 0",
                 where(),
                 "Pass tensors that are equal on all ranks, or drop partition=: under data "
                 "parallelism alone each rank has a batch of its own, and there is nothing to "
                 "partition."));
}

class GroupPacker final : public PartitionPacker {
 public:
  explicit GroupPacker(std::shared_ptr<Communicator> communicator)
      : group_(std::make_shared<PartitionGroup>(std::move(communicator))) {}

  PackedList pack_inputs(const TensorList& inputs, const std::string& function) override {
    return group_->pack(inputs, function);
  }
  c10::intrusive_ptr<PackedSavedTensor> pack(const at::Tensor& /*tensor*/) override {
    C10_THROW_ERROR(NotImplementedError,
                    error_text("checkpoint", "got a packer of partition= for one tensor", {},
                               "Give it to a checkpoint, as CheckpointOptions::partition."));
  }
  PartitionMemory memory() const override { return group_->memory(); }

 private:
  std::shared_ptr<PartitionGroup> group_;
};

}  // namespace

c10::intrusive_ptr<PartitionPacker> make_partition_packer(
    std::shared_ptr<Communicator> communicator) {
  TORCH_CHECK_VALUE(communicator, error_text("checkpoint", "got no communicator for partition=", {},
                                             "Pass that of the ranks that share their inputs."));
  return c10::make_intrusive<GroupPacker>(std::move(communicator));
}

}  // namespace trireme

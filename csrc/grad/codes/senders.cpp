#include <trireme/grad/codes/senders.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/host.h>
#include <trireme/comm/hosts/host_layout.h>
#include <trireme/comm/subgroups.h>
#include <trireme/common/error.h>
#include <trireme/shm/host_group.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace trireme {
namespace {

constexpr const char* kArea = "compression";

std::string text_of(const std::optional<Compression>& compression) {
  return compression ? to_string(*compression) : "no compression";
}

// Returns the host whose ranks send together, if ranks do not send for themselves.
Host* host_of(Communicator& ranks, Between between) {
  return between == Between::kHosts ? ranks.host() : nullptr;
}

void say_that_nothing_changes(const Communicator& ranks) {
  if (ranks.rank() != 0) return;
  TORCH_WARN_ONCE(error_text(
      kArea, "all ranks are on one host, so nothing is compressed between hosts", ranks.rank_of(),
      "Pass between=\"ranks\" to compress between the ranks of a host."));
}

std::shared_ptr<Communicator> split(Communicator& ranks, const std::vector<int64_t>& members,
                                    const std::string& name) {
  return ranks.split({members.begin(), members.end()}, name);
}

std::vector<int64_t> legs_beside(const HostLayout& layout) {
  std::vector<int64_t> members;
  for (const auto& host : layout.hosts) members.push_back(host[static_cast<size_t>(layout.place)]);
  return members;
}

// The slots that are taken over each communicator of this process.
class Slots {
 public:
  static Slots& all() {
    static Slots one;
    return one;
  }

  // Takes the first slot that is free on all ranks. Collective: one gather of flags.
  std::shared_ptr<const size_t> take(const std::shared_ptr<Communicator>& ranks) {
    const at::Tensor are_taken = gather(flags_of(ranks), *ranks);
    size_t free = 0;
    while (free < kMost && are_taken[static_cast<int64_t>(free)].item<bool>()) ++free;
    TORCH_CHECK(free < kMost, error_text(kArea,
                                         "got more than " + std::to_string(kMost) +
                                             " models that are compressed over one group",
                                         ranks->rank_of(), "Delete some of them."));
    auto slot = std::make_shared<const size_t>(free);
    const std::lock_guard lock(mutex_);
    Taken& own = taken_[ranks];
    own.resize(std::max(own.size(), free + 1));
    own[free] = slot;
    return slot;
  }

 private:
  using Taken = std::vector<std::weak_ptr<const size_t>>;
  static constexpr size_t kMost = 1024;  // coders over one communicator

  at::Tensor flags_of(const std::shared_ptr<Communicator>& ranks) {
    at::Tensor flags = at::zeros({static_cast<int64_t>(kMost)}, at::kByte);
    const std::lock_guard lock(mutex_);
    std::erase_if(taken_, [](const auto& entry) { return entry.first.expired(); });
    const Taken& own = taken_[ranks];
    for (size_t i = 0; i < own.size(); ++i)
      if (!own[i].expired()) flags[static_cast<int64_t>(i)] = 1;
    return flags;
  }

  // Returns where any rank has a flag.
  static at::Tensor gather(const at::Tensor& flags, Communicator& ranks) {
    const at::Tensor own = flags.to(ranks.device());
    at::Tensor of_all = at::empty({ranks.world() * own.numel()}, own.options());
    ranks.all_gather({of_all}, {own}, "coders between hosts").wait();
    return of_all.view({ranks.world(), -1}).cpu().ne(0).any(0);
  }

  std::mutex mutex_;
  std::map<std::weak_ptr<Communicator>, Taken, std::owner_less<>> taken_;
};

Senders senders_of(const std::shared_ptr<Communicator>& ranks, const HostLayout& layout) {
  Senders senders{layout.count(), layout.host, layout.legs, layout.place, nullptr};
  senders.slot = Slots::all().take(ranks);
  const std::string slot = ", coder " + std::to_string(*senders.slot);
  if (layout.ranks_here() > 1) {
    const std::string host = std::to_string(layout.here().front());
    senders.inside = split(*ranks, layout.here(), "host of " + host + slot);
    senders.spread = duplicate(*senders.inside);
  }
  if (layout.has_leg())
    senders.between =
        split(*ranks, legs_beside(layout), "leg " + std::to_string(layout.place) + slot);
  return senders;
}

void announce(const std::shared_ptr<Communicator>& ranks, const std::string& text) noexcept {
  if (ranks && ranks->world() > 1 && !ranks->failure()) ranks->announce_failure(text);
}

}  // namespace

void Senders::announce_failure(const std::string& text) const noexcept {
  announce(inside, text);
  announce(spread, text);
  announce(between, text);
}

bool has_several_senders(Communicator& ranks, Between between) {
  if (ranks.world() == 1) return false;
  Host* host = host_of(ranks, between);
  if (host == nullptr || host->group().hosts().size() > 1) return true;
  say_that_nothing_changes(ranks);
  return false;
}

Senders make_senders(const std::shared_ptr<Communicator>& ranks, Between between) {
  Host* host = host_of(*ranks, between);
  if (host == nullptr) return {ranks->world(), ranks->rank(), 1, 0, ranks};
  return senders_of(ranks, HostLayout(host->group().hosts(), ranks->rank()));
}

void check_same_compression(Communicator& communicator,
                            const std::optional<Compression>& compression) {
  const auto difference = first_difference(
      distinct_texts({text_of(compression), kArea}, communicator, communicator.device()));
  TORCH_CHECK_VALUE(
      !difference,
      error_text(kArea,
                 "got " + difference->first + " on rank 0 and " + difference->other + " on rank " +
                     std::to_string(difference->rank) + ", expected the same on all ranks",
                 communicator.rank_of(), "Pass the same compression on every rank."));
}

void refuse_sparse(const std::string& parameter, RankOf where) {
  TORCH_CHECK_VALUE(
      false,
      error_text(kArea, "got sparse gradients of '" + parameter + "', expected dense ones", where,
                 "Leave sparse=True out of the layer, or compression out of the wrapper."));
}

void check_compressible(const std::vector<ParameterInfo>& parameters, RankOf where) {
  for (const ParameterInfo& info : parameters)
    if (info.sparse_gradient) refuse_sparse(info.name, where);
}

}  // namespace trireme

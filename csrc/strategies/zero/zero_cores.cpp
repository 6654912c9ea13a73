#include <trireme/strategies/zero/zero_cores.h>

#include <trireme/common/error.h>
#include <trireme/common/language.h>

#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

// Who holds which parameter, in this process. Under its mutex nothing is destroyed that may take
// the GIL.
struct Holders {
  std::mutex mutex;
  std::unordered_map<const at::TensorImpl*, ZeroCores*> of;

  static Holders& all() {
    static Holders one;
    return one;
  }
};

// Returns what `list` lists of each, in one list.
template <typename List>
auto of_all(const std::vector<std::shared_ptr<Zero>>& cores, const List& list) {
  std::invoke_result_t<List, const Zero&> all;
  for (const auto& core : cores) {
    const auto& its = list(*core);
    all.insert(all.end(), its.begin(), its.end());
  }
  return all;
}

}  // namespace

ZeroCores::ZeroCores(std::shared_ptr<Communicator> communicator, const ZeroOptions& options,
                     std::function<void()> retired)
    : communicator_(std::move(communicator)), options_(options), retired_(std::move(retired)) {}

ZeroCores::~ZeroCores() {
  give_back();
  const std::lock_guard lock(Holders::all().mutex);
  for (const auto& core : cores_)
    for (const at::Tensor& parameter : core->parameters()) {
      const auto found = Holders::all().of.find(parameter.unsafeGetTensorImpl());
      if (found != Holders::all().of.end() && found->second == this) Holders::all().of.erase(found);
    }
}

std::shared_ptr<ZeroCores> ZeroCores::of(const at::Tensor& parameter) {
  const std::lock_guard lock(Holders::all().mutex);
  const auto found = Holders::all().of.find(parameter.unsafeGetTensorImpl());
  return found == Holders::all().of.end() ? nullptr : found->second->weak_from_this().lock();
}

std::vector<KeptCodes> ZeroCores::kept_codes() const {
  std::vector<KeptCodes> all = of_all(cores_, [](const Zero& core) { return core.kept_codes(); });
  for (size_t i = 1; i < all.size(); ++i) all[i].prefix = "group " + std::to_string(i) + ", ";
  return all;
}

void ZeroCores::claim(const NamedParameters& parameters) {
  {
    const std::lock_guard lock(Holders::all().mutex);
    for (const at::Tensor& parameter : parameters.tensors) {
      ZeroCores*& holder = Holders::all().of[parameter.unsafeGetTensorImpl()];
      claimed_.push_back({parameter, {}});
      if (holder != nullptr) claimed_.back().before = holder->weak_from_this();
      holder = this;
    }
  }
  try {
    check_claim(parameters);
  } catch (...) {
    give_back();
    throw;
  }
}

void ZeroCores::check_claim(const NamedParameters& parameters) const {
  std::unordered_set<const ZeroCores*> checked;
  for (size_t i = 0; i < claimed_.size(); ++i) {
    const std::shared_ptr<ZeroCores> other = claimed_[i].before.lock();
    if (other.get() == this)
      refuse("got '" + parameters.names[i] + "' twice", "Give each parameter once.");
    if (other && checked.insert(other.get()).second) check_all_given(*other, parameters.names[i]);
  }
}

// An optimizer that has some of another one's parameters must have all.
void ZeroCores::check_all_given(const ZeroCores& other, const std::string& name) const {
  std::unordered_set<const at::TensorImpl*> given;
  for (const Claimed& one : claimed_) given.insert(one.parameter.unsafeGetTensorImpl());
  std::vector<std::string> left;
  for (const auto& core : other.cores_)
    for (size_t i = 0; i < core->parameters().size(); ++i)
      if (!given.contains(core->parameters()[i].unsafeGetTensorImpl()))
        left.push_back(core->parameter_infos()[i].name);
  if (left.empty()) return;
  const std::string counted = "its " + std::to_string(left.size()) + " other parameters";
  std::string named = "'" + left.front() + "'";
  if (left.size() > 1)
    named += " and " + std::to_string(left.size() - 1) + " more of its parameters";
  const char* without = in_language({.cpp = counted.c_str(), .python = named.c_str()});
  refuse("got '" + name + "', which another ZeroRedundancyOptimizer holds, without " + without +
             ", expected all of them or none",
         in_language({.cpp = "Give all of them to take over from it, or destroy it first.",
                      .python = "Give all of them to take over from it, or delete it first."}));
}

void ZeroCores::shard(NamedParameters parameters) {
  cores_.push_back(std::make_shared<Zero>(std::move(parameters), communicator_, options_));
  std::vector<std::shared_ptr<BackwardTrigger>> triggers;
  for (const auto& core : cores_)
    if (core->trigger()) triggers.push_back(core->trigger());
  BackwardTrigger::arm_together(triggers);
}

void ZeroCores::commit() {
  std::unordered_set<std::shared_ptr<ZeroCores>> others;
  for (const Claimed& one : std::exchange(claimed_, {}))
    if (auto before = one.before.lock()) others.insert(std::move(before));
  committed_ = cores_.size();
  for (const auto& other : others) other->retire();
}

void ZeroCores::undo() {
  give_back();
  for (; cores_.size() > committed_; cores_.pop_back()) {
    if (!cores_.back()->shares_parameters()) continue;
    // What steps them now knows of no other rank.
    for (const at::Tensor& parameter : cores_.back()->parameters())
      parameter.set_data(parameter.detach().clone());
  }
}

void ZeroCores::give_back() {
  const std::vector<Claimed> claimed = std::exchange(claimed_, {});
  std::vector<std::shared_ptr<ZeroCores>> before;  // alive until the lock is gone
  for (const Claimed& one : claimed) before.push_back(one.before.lock());
  const std::lock_guard lock(Holders::all().mutex);
  for (size_t i = claimed.size(); i-- > 0;) {
    const auto found = Holders::all().of.find(claimed[i].parameter.unsafeGetTensorImpl());
    if (found == Holders::all().of.end() || found->second != this) continue;
    if (before[i]) {
      found->second = before[i].get();
    } else {
      Holders::all().of.erase(found);
    }
  }
}

void ZeroCores::retire() {
  for (const auto& core : cores_) core->retire();
  cores_.clear();
  is_retired_ = true;
  retired_();
}

const std::vector<std::shared_ptr<Zero>>& ZeroCores::live() const {
  TORCH_CHECK(!is_retired_,
              error_text("zero",
                         "got a call of an optimizer whose parameters another "
                         "ZeroRedundancyOptimizer has taken over",
                         communicator_->rank_of(), "Use the one that was made last."));
  return cores_;
}

std::vector<at::Tensor> ZeroCores::parameters() const {
  return of_all(cores_, [](const Zero& core) { return core.parameters(); });
}

std::vector<at::Tensor> ZeroCores::shards() const {
  return of_all(cores_, [](const Zero& core) { return core.shards(); });
}

std::vector<ShardedParameter> ZeroCores::sharded_parameters() const {
  return of_all(live(), [](const Zero& core) {
    return trireme::sharded_parameters(core.parameter_infos(), core.plan());
  });
}

bool ZeroCores::begin_step(const ZeroStep& step) {
  bool goes = true;
  for (const auto& core : live()) goes = core->begin_step(step) && goes;
  return goes;
}

void ZeroCores::end_step() {
  for (const auto& core : cores_) core->end_step();
}

void ZeroCores::abandon_step(const std::string& reason) noexcept {
  for (const auto& core : cores_) core->abandon_step(reason);
}

void ZeroCores::zero_grad(bool set_to_none) {
  for (const auto& core : live()) core->zero_grad(set_to_none);
}

void ZeroCores::set_synchronize(bool synchronize) {
  for (const auto& core : cores_) core->set_synchronize(synchronize);
}

void ZeroCores::set_divisor(double divisor) {
  for (const auto& core : cores_)
    if (core->reducer() != nullptr) core->reducer()->set_divisor(divisor);
}

void ZeroCores::set_armed_callback(const std::function<void()>& callback) {
  if (!cores_.empty() && cores_.front()->trigger())
    cores_.front()->trigger()->set_armed_callback(callback);
}

void ZeroCores::shadow_backward() {
  for (const auto& core : live())
    if (core->reducer() != nullptr) core->reducer()->shadow_backward();
}

void ZeroCores::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text("zero", got, communicator_->rank_of(), next_step));
}

}  // namespace trireme

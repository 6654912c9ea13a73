#include <trireme/strategies/pipeline/gradients/tied_parameters.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/comm/make_channels.h>
#include <trireme/common/error.h>
#include <trireme/common/text_lines.h>
#include <trireme/strategies/pipeline/gradients/step_gradients.h>
#include <trireme/strategies/pipeline/refuse.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace trireme {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kSampled = 16;  // elements of a copy that are compared
// The largest difference between copies, relative to the largest element that is compared.
constexpr double kTolerance = 0.05;

// The kinds of gradients in a message, behind what describe() says of the parameter.
constexpr char kNone = 'n';
constexpr char kDense = 'd';
constexpr char kSparse = 's';

// Describes what must be equal in all copies.
std::string describe(const at::Tensor& parameter) {
  return c10::str(parameter.scalar_type(), " ", parameter.sizes(),
                  parameter.requires_grad() ? "" : ", frozen");
}

at::Tensor sample_of(const at::Tensor& parameter) {
  at::Tensor flat = parameter.detach();
  if (flat.is_complex()) flat = at::view_as_real(flat.resolve_conj());
  flat = flat.reshape({-1});
  const int64_t step = std::max<int64_t>(1, flat.numel() / kSampled);
  return flat.slice(0, 0, std::min(flat.numel(), kSampled * step), step).to(at::kDouble);
}

// Copies with NaN are alike: a loss that is NaN is not for us to report.
bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0) return true;
  const double largest = at::maximum(one.abs().max(), other.abs().max()).item<double>();
  return !((one - other).abs().max().item<double>() > kTolerance * largest);
}

}  // namespace

std::vector<TiedParameter> find_tied(const std::vector<StageTensors>& stages) {
  struct Found {
    TiedParameter parameter;
    std::set<int64_t> ranks;
  };
  std::vector<Found> all;
  std::map<const c10::TensorImpl*, size_t> places;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const StageTensors& one = stages[stage];
    for (size_t i = 0; i < one.tensors.size(); ++i) {
      const auto [place, is_new] =
          places.try_emplace(one.tensors[i].unsafeGetTensorImpl(), all.size());
      if (is_new) all.emplace_back();
      Found& found = all[place->second];
      if (found.ranks.insert(one.rank).second)
        found.parameter.holders.push_back({static_cast<int64_t>(stage), one.names[i]});
    }
  }
  std::vector<TiedParameter> tied;
  for (Found& found : all)
    if (found.ranks.size() > 1) tied.push_back(std::move(found.parameter));
  return tied;
}

TiedParameters::TiedParameters(const PipelineSchedule& schedule, std::vector<TiedParameter> tied,
                               Communicator& communicator)
    : communicator_(communicator),
      where_(communicator.rank_of()),
      stage_rank_(schedule.stage_rank),
      tied_(std::move(tied)),
      own_(tied_.size()) {
  check_holders(schedule.stages);
  for (size_t i = 0; i < tied_.size(); ++i) {
    const auto& holders = tied_[i].holders;
    const int64_t first = rank_of(holders.front());
    for (size_t holder = 1; holder < holders.size(); ++holder) {
      const int64_t later = rank_of(holders[holder]);
      auto link = std::find_if(links_.begin(), links_.end(), [&](const Link& one) {
        return one.first_rank == first && one.later_rank == later;
      });
      if (link == links_.end()) link = links_.insert(links_.end(), Link{first, later});
      link->items.push_back({i, holder});
    }
  }
  if (links_.empty()) return;
  std::vector<ChannelRequest> requests;
  for (const Link& link : links_) {
    const std::string ranks = c10::str(" of ranks ", link.first_rank, " and ", link.later_rank);
    requests.push_back({link.later_rank, link.first_rank, 1, "gradients of what is tied" + ranks});
    requests.push_back({link.first_rank, link.later_rank, 1, "sums of what is tied" + ranks});
  }
  channels_ = make_channels(communicator_, std::move(requests));
  size_t next = 0;
  for (Link& link : links_) {
    link.gradients_to = channels_->sender(next);
    link.gradients_from = channels_->receiver(next++);
    link.sums_to = channels_->sender(next);
    link.sums_from = channels_->receiver(next++);
  }
}

void TiedParameters::check_holders(int64_t stages) const {
  for (const TiedParameter& one : tied_) {
    std::set<int64_t> ranks;
    bool is_right = one.holders.size() > 1;
    int64_t last = -1;
    for (const auto& holder : one.holders) {
      is_right = is_right && last < holder.stage && holder.stage < stages &&
                 ranks.insert(rank_of(holder)).second;
      last = holder.stage;
    }
    if (is_right) continue;
    const std::string name = one.holders.empty() ? "" : " '" + one.holders.front().name + "'";
    refuse_pipeline(
        "got a tied parameter" + name + " whose holders are not stages of several ranks",
        "Name two or more stages in their order, one for each rank.");
  }
}

std::string TiedParameters::set_parameters(int64_t stage, const NamedParameters& parameters) {
  for (size_t i = 0; i < tied_.size(); ++i) {
    for (const auto& holder : tied_[i].holders) {
      if (holder.stage != stage) continue;
      const auto name = std::find(parameters.names.begin(), parameters.names.end(), holder.name);
      if (name == parameters.names.end()) {
        return "stage " + std::to_string(stage) + " without '" + holder.name + "', which is tied";
      }
      own_[i] = parameters.tensors[static_cast<size_t>(name - parameters.names.begin())];
    }
  }
  return {};
}

std::string TiedParameters::complaint() const {
  for (size_t i = 0; i < tied_.size(); ++i) {
    for (const auto& holder : tied_[i].holders) {
      if (rank_of(holder) == where_.rank && !own_[i].defined())
        return "stage " + std::to_string(holder.stage) + " without '" + holder.name + "'";
    }
  }
  return {};
}

void TiedParameters::compare_descriptions() {
  std::string own = as_complaint(complaint());
  if (own.empty()) {
    for (const at::Tensor& parameter : own_)
      own += (parameter.defined() ? describe(parameter) : std::string()) + "\n";
  }
  const auto texts = gather_texts(own, communicator_, communicator_.device());
  if (const auto wrong = first_complaint(texts)) {
    refuse_pipeline(c10::str("got ", wrong->text, ", which is tied (rank ", wrong->rank, " of ",
                             where_.world, ")"),
                    "Give each stage the parameters that it is said to have.");
  }
  std::vector<std::vector<std::string>> lines;
  for (const std::string& text : texts) lines.push_back(lines_of(text));
  for (size_t i = 0; i < tied_.size(); ++i) {
    const auto& first = tied_[i].holders.front();
    const auto text_of = [&](const auto& holder) {
      return lines[static_cast<size_t>(rank_of(holder))][i];
    };
    for (const auto& holder : tied_[i].holders) {
      if (text_of(holder) == text_of(first)) continue;
      refuse_pipeline(
          c10::str("got '", first.name, "' and '", holder.name, "', which are one parameter, as ",
                   text_of(first), " on rank ", rank_of(first), ", and as ", text_of(holder),
                   " on rank ", rank_of(holder)),
          "Make the same module on all ranks.");
    }
  }
}

void TiedParameters::spread_values() {
  if (links_.empty()) return;
  compare_descriptions();
  const at::NoGradGuard no_grad;
  const std::string label = "values of tied parameters";
  for (const Link& link : links_) {
    if (link.first_rank != where_.rank) continue;
    TensorMessage message;
    for (const Item& item : link.items) message.tensors.push_back(own_[item.tied].detach());
    link.sums_to->send(message, label);
  }
  for (const Link& link : links_) {
    if (link.later_rank != where_.rank) continue;
    const TensorMessage message = link.sums_from->receive(0, 0, label);
    for (size_t i = 0; i < link.items.size(); ++i) {
      const at::Tensor& own = own_[link.items[i].tied];
      if (!own.is_alias_of(message.tensors[i])) own.copy_(message.tensors[i]);
    }
    link.sums_from->done_with_one();
  }
  communicator_.barrier(label).wait();  // a rank that ended here would take its message along
}

TensorMessage TiedParameters::pack(const Link& link, int64_t step) const {
  TensorMessage message{.step = step};
  for (const Item& item : link.items) {
    const at::Tensor& parameter = own_[item.tied];
    at::Tensor gradient = parameter.grad();
    message.tensors.push_back(sample_of(parameter));
    char kind = kNone;
    if (gradient.defined() && gradient.is_sparse()) {
      gradient = gradient.coalesce();
      message.tensors.push_back(gradient.indices());
      message.tensors.push_back(gradient.values());
      kind = kSparse;
    } else if (gradient.defined()) {
      message.tensors.push_back(gradient.detach());
      kind = kDense;
    }
    message.text += describe(parameter) + kind + "\n";
  }
  return message;
}

Tensors TiedParameters::unpack(const Link& link, TensorMessage message) const {
  std::istringstream text(message.text);
  size_t next = 0;
  Tensors gradients;
  for (const Item& item : link.items) {
    std::string line;
    std::getline(text, line);
    TORCH_INTERNAL_ASSERT(!line.empty());
    const char kind = line.back();
    line.pop_back();
    const at::Tensor sample = message.tensors.at(next++);
    check_copy(item, line, sample);
    at::Tensor& gradient = gradients.emplace_back();
    if (kind == kDense) {
      gradient = message.tensors.at(next++);
    } else if (kind == kSparse) {
      const at::Tensor indices = message.tensors.at(next++);
      gradient = at::sparse_coo_tensor(indices, message.tensors.at(next++), own_[item.tied].sizes())
                     ._coalesced_(true);
    }
  }
  return gradients;
}

void TiedParameters::check_copy(const Item& item, const std::string& description,
                                const at::Tensor& sample) const {
  const auto& holders = tied_[item.tied].holders;
  const bool is_first = rank_of(holders.front()) == where_.rank;
  const auto& own = is_first ? holders.front() : holders[item.holder];
  const auto& other = is_first ? holders[item.holder] : holders.front();
  const auto refuse = [&](const std::string& got, const std::string& theirs, const char* next) {
    TORCH_CHECK_VALUE(false,
                      error_text("pipeline",
                                 c10::str("got '", own.name, "'", got, " on rank ", rank_of(own),
                                          ", and '", other.name, "', which is tied to it, ", theirs,
                                          " on rank ", rank_of(other)),
                                 where_, next));
  };
  const at::Tensor& parameter = own_[item.tied];
  if (describe(parameter) != description) {
    refuse(" as " + describe(parameter), "as " + description,
           "Freeze it, cast it and replace it on all ranks alike.");
  }
  if (!are_alike(sample_of(parameter).to(sample.device()), sample)) {
    refuse("", "with other values",
           "Update it by the same optimizer on both, and load the same values.");
  }
}

void TiedParameters::add_up(int64_t step) {
  if (links_.empty()) return;
  const at::NoGradGuard no_grad;
  const std::string label = label_of(step);
  for (const Link& link : links_)
    if (link.later_rank == where_.rank) link.gradients_to->send(pack(link, step), label);

  // Gradients of the later holders, for each parameter whose first copy is here.
  std::map<size_t, Tensors> others;
  for (const Link& link : links_) {
    if (link.first_rank != where_.rank) continue;
    Tensors came = unpack(link, link.gradients_from->receive(step, 0, label));
    for (size_t i = 0; i < link.items.size(); ++i) {
      const auto& [tied, holder] = link.items[i];
      Tensors& all = others[tied];
      all.resize(tied_[tied].holders.size() - 1);
      all[holder - 1] = std::move(came[i]);
    }
  }
  for (const auto& [tied, gradients] : others) {
    at::Tensor& sum = own_[tied].mutable_grad();
    for (const at::Tensor& gradient : gradients) sum = sum_of(std::move(sum), gradient);
  }
  others.clear();
  for (const Link& link : links_)
    if (link.first_rank == where_.rank) link.gradients_from->done_with_one();
}

void TiedParameters::send_sums(int64_t step) {
  if (links_.empty()) return;
  const at::NoGradGuard no_grad;
  const std::string label = label_of(step);
  for (const Link& link : links_) {
    if (link.first_rank != where_.rank) continue;
    for (const Item& item : link.items) {  // all copies hold what is sent
      at::Tensor& sum = own_[item.tied].mutable_grad();
      if (sum.defined() && sum.is_sparse()) sum = sum.coalesce();
    }
    link.sums_to->send(pack(link, step), label);
  }
  for (const Link& link : links_) {
    if (link.later_rank != where_.rank) continue;
    const Tensors sums = unpack(link, link.sums_from->receive(step, 0, label));
    for (size_t i = 0; i < link.items.size(); ++i) {
      at::Tensor& gradient = own_[link.items[i].tied].mutable_grad();
      const at::Tensor& sum = sums[i];
      if (gradient.defined() && sum.defined() && !gradient.is_sparse() && !sum.is_sparse()) {
        gradient.copy_(sum);
      } else {
        gradient = sum.defined() ? sum.clone() : at::Tensor();
      }
    }
    link.sums_from->done_with_one();
  }
}

Tensors TiedParameters::copies(bool are_first) const {
  Tensors found;
  for (size_t i = 0; i < tied_.size(); ++i) {
    const bool is_first = rank_of(tied_[i].holders.front()) == where_.rank;
    if (own_[i].defined() && is_first == are_first) found.push_back(own_[i]);
  }
  return found;
}

}  // namespace trireme

#include <trireme/strategies/fsdp/all_reduce_hooks.h>

#include <trireme/common/trace.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <utility>

namespace trireme {
namespace {

void call(const AllReduceHook& hook, const std::vector<const OwnSum*>& sums) {
  int64_t numel = 0;
  for (const OwnSum* sum : sums) numel += sum->longest;
  const at::Tensor row = at::zeros({numel}, sums.front()->values.options());
  const auto place_of = [&row](const OwnSum& sum, int64_t begin) {
    return row.narrow(0, begin, sum.values.numel());
  };
  int64_t begin = 0;
  for (const OwnSum* sum : sums) {
    place_of(*sum, begin).copy_(sum->values);
    begin += sum->longest;
  }
  at::Tensor shown = row;
  hook(shown);
  begin = 0;
  for (const OwnSum* sum : sums) {
    sum->values.copy_(place_of(*sum, begin));
    begin += sum->longest;
  }
}

}  // namespace

void set_all_reduce_hooks(OwnerDelivery& delivery, std::vector<AllReduceHook> hooks,
                          const std::vector<size_t>& parameters) {
  TORCH_INTERNAL_ASSERT(hooks.size() == parameters.size());
  std::vector<size_t> unit_of;
  std::vector<bool> has_hook;
  for (size_t unit = 0; unit < parameters.size(); ++unit) {
    unit_of.insert(unit_of.end(), parameters[unit], unit);
    has_hook.insert(has_hook.end(), parameters[unit], hooks[unit] != nullptr);
  }
  if (std::find(has_hook.begin(), has_hook.end(), true) == has_hook.end())
    return delivery.set_summed_callback(std::move(has_hook), nullptr);
  delivery.set_summed_callback(has_hook, [hooks = std::move(hooks), unit_of = std::move(unit_of)](
                                             const std::vector<OwnSum>& sums) {
    TRIREME_TRACE("fsdp.all_reduce_hooks");
    const at::NoGradGuard no_grad;
    std::map<std::pair<size_t, at::ScalarType>, std::vector<const OwnSum*>> rows;
    for (const OwnSum& sum : sums)
      rows[{unit_of[static_cast<size_t>(sum.parameter)], sum.values.scalar_type()}].push_back(&sum);
    for (const auto& [key, row] : rows) call(hooks[key.first], row);
  });
}

}  // namespace trireme

#include <trireme/strategies/remote/carried_autocast.h>

#include <trireme/strategies/remote/wire_messages.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace trireme::remote {
namespace {

std::vector<c10::DeviceType> devices_here() {
  std::vector<c10::DeviceType> devices{c10::kCPU};
  if (const auto accelerator = at::getAccelerator()) devices.push_back(*accelerator);
  return devices;
}

// Returns a number of a tuple that lies in [0, end).
int64_t number_in(const Value& pair, size_t place, int64_t end) {
  const auto* tuple = pair.get_if<Tuple>();
  const int64_t* number = tuple != nullptr && tuple->items.size() == 2
                              ? tuple->items[place].get_if<int64_t>()
                              : nullptr;
  if (number == nullptr || *number < 0 || *number >= end) refuse_message("of another form");
  return *number;
}

// Whether a served call keeps casts. Torch has one cache for the process, which knows neither
// dtypes nor threads: no call may find another call's casts.
std::atomic<bool> caching{false};

}  // namespace

Value present_autocast() {
  Tuple carried{{at::autocast::is_autocast_cache_enabled()}};
  for (const c10::DeviceType device : devices_here())
    if (at::autocast::is_autocast_enabled(device))
      carried.items.emplace_back(
          Tuple{{static_cast<int64_t>(device),
                 static_cast<int64_t>(at::autocast::get_autocast_dtype(device))}});
  if (carried.items.size() == 1) return {};
  return carried;
}

CarriedAutocast::CarriedAutocast(const Value& carried) {
  if (carried.is<std::monostate>()) return;
  const auto* tuple = carried.get_if<Tuple>();
  const bool* caches =
      tuple != nullptr && !tuple->items.empty() ? tuple->items.front().get_if<bool>() : nullptr;
  if (caches == nullptr) refuse_message("of another form");
  std::vector<State> wanted;
  for (size_t i = 1; i < tuple->items.size(); ++i) {
    const auto device = static_cast<c10::DeviceType>(
        number_in(tuple->items[i], 0, int64_t{c10::COMPILE_TIME_MAX_DEVICE_TYPES}));
    const auto dtype = static_cast<at::ScalarType>(
        number_in(tuple->items[i], 1, static_cast<int64_t>(at::ScalarType::NumOptions)));
    if (!at::isFloatingType(dtype)) refuse_message("of another form");
    // A caller may have an accelerator that this process does not have.
    if (!at::autocast::is_autocast_available(device)) continue;
    wanted.push_back({device, true, dtype});
    before_.push_back({device, at::autocast::is_autocast_enabled(device),
                       at::autocast::get_autocast_dtype(device)});
  }
  cached_before_ = at::autocast::is_autocast_cache_enabled();
  is_on_ = true;
  at::autocast::increment_nesting();
  for (const State& state : wanted) {
    at::autocast::set_autocast_enabled(state.device, true);
    at::autocast::set_autocast_dtype(state.device, state.dtype);
  }
  caches_ = *caches && !caching.exchange(true);
  at::autocast::set_autocast_cache_enabled(caches_);
}

CarriedAutocast::~CarriedAutocast() {
  if (!is_on_) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  if (caches_) caching = false;
  for (const State& state : before_) {
    at::autocast::set_autocast_enabled(state.device, state.is_enabled);
    at::autocast::set_autocast_dtype(state.device, state.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cached_before_);
}

}  // namespace trireme::remote

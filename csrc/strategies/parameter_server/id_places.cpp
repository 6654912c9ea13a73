#include <trireme/strategies/parameter_server/id_places.h>

#include <algorithm>
#include <bit>

namespace trireme::ps {

void IdPlaces::begin(int64_t most) {
  if (ids_.size() < static_cast<size_t>(most)) ids_.resize(static_cast<size_t>(most));
  count_ = 0;
  const size_t slots = std::bit_ceil(static_cast<size_t>(2 * std::max<int64_t>(most, 8)));
  places_.assign(slots, 0);
  mask_ = slots - 1;
}

}  // namespace trireme::ps

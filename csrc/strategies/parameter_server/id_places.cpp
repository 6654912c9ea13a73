#include <trireme/strategies/parameter_server/id_places.h>

#include <algorithm>
#include <bit>

namespace trireme::ps {

void IdPlaces::begin(int64_t most) {
  ids_.clear();
  const size_t slots = std::bit_ceil(static_cast<size_t>(2 * std::max<int64_t>(most, 8)));
  places_.assign(slots, 0);
  mask_ = slots - 1;
}

}  // namespace trireme::ps

#include <trireme/strategies/parameter_server/row_sums.h>

#include <algorithm>

namespace trireme::ps {

void RowSums::begin(int64_t most) {
  places_.begin(most);
  rows_.clear();
  count_ = 0;
}

std::byte* RowSums::sum_at(int64_t index) const {
  return sums_.data() + index * dim_ * static_cast<int64_t>(c10::elementSize(computed_));
}

Span RowSums::own(int64_t place) {
  Row& row = rows_[static_cast<size_t>(place)];
  if (row.sum < 0) {
    row.sum = count_++;
    const auto needed = static_cast<size_t>(count_ * dim_) * c10::elementSize(computed_);
    if (sums_.size() < needed) sums_.resize(std::max(needed, 2 * sums_.size()));
    scaled_copy({sum_at(row.sum), computed_, dim_}, row.once, 1.0);
  }
  return {sum_at(row.sum), computed_, dim_};
}

int64_t RowSums::add(int64_t id, ConstSpan row) {
  bool is_new = false;
  const int64_t place = places_.place_of(id, is_new);
  if (is_new) {
    rows_.push_back({row});
  } else {
    scaled_add(own(place), row, 1.0);
  }
  return place;
}

ConstSpan RowSums::row(int64_t place) const {
  const Row& row = rows_[static_cast<size_t>(place)];
  if (row.sum < 0) return row.once;
  return {sum_at(row.sum), computed_, dim_};
}

}  // namespace trireme::ps

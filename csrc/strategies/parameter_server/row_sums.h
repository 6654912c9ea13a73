#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/id_places.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme::ps {

// Sums rows by id, in the order in which they come. The row of an id that comes once is not copied,
// so it must stay as it is. Keeps its memory between uses.
class TRIREME_API RowSums {
 public:
  // `dim`: elements of a row. `computed`: the dtype of sums, fp32, or fp64 for fp64.
  RowSums(int64_t dim, at::ScalarType computed) : dim_(dim), computed_(computed) {}

  // Forgets all rows, and makes room for `most` ids; more must not come.
  void begin(int64_t most);
  // Adds a row to the sum of its id, and returns the id's place.
  int64_t add(int64_t id, ConstSpan row);
  // Returns the sum of an id as memory of its own, which may be written.
  Span own(int64_t place);

  int64_t size() const { return places_.size(); }
  c10::IntArrayRef ids() const { return places_.ids(); }
  int64_t id(int64_t place) const { return places_.ids()[static_cast<size_t>(place)]; }
  // Returns the sum of an id; ids are numbered in the order of first occurrence.
  ConstSpan row(int64_t place) const;

 private:
  struct Row {
    ConstSpan once;    // the only row, if the id has come once
    int64_t sum = -1;  // else the index of its sum
  };

  std::byte* sum_at(int64_t index) const;

  int64_t dim_;
  at::ScalarType computed_;
  IdPlaces places_;
  std::vector<Row> rows_;
  mutable std::vector<std::byte> sums_;
  int64_t count_ = 0;
};

}  // namespace trireme::ps

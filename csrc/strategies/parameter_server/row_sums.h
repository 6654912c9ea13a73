#pragma once

#include <trireme/common/export.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/id_places.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace trireme::ps {

// Adds up rows by their id, each in the order in which they come. Rows of an id that comes once are
// not copied, so they must stay as they are. Keeps its memory between uses.
class TRIREME_API RowSums {
 public:
  // `dim`: elements of a row. Sums are made in fp32, in fp64 for fp64 (`computed`).
  RowSums(int64_t dim, at::ScalarType computed) : dim_(dim), computed_(computed) {}

  // Forgets all rows, and makes room for ids of so many.
  void begin(int64_t most);
  // Returns the place of the id.
  int64_t add(int64_t id, ConstSpan row);
  // Makes the sum of an id a row of its own, which may be written, and returns it.
  Span own(int64_t place);

  int64_t size() const { return places_.size(); }
  const std::vector<int64_t>& ids() const { return places_.ids(); }
  int64_t id(int64_t place) const { return places_.ids()[static_cast<size_t>(place)]; }
  // Returns the sum of an id, numbered in the order in which they came first.
  ConstSpan row(int64_t place) const;

 private:
  struct Row {
    ConstSpan once;    // while it has come once
    int64_t sum = -1;  // else where its sum lies
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

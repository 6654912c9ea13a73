#pragma once

#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// A box in a tensor: elements [first[d], first[d] + sizes[d]) of each dimension d. A scalar has one
// box, without dimensions.
struct TensorBox {
  std::vector<int64_t> first;
  std::vector<int64_t> sizes;

  TRIREME_API int64_t numel() const;
  auto operator<=>(const TensorBox&) const = default;
};

// Returns all of a tensor of these sizes.
TRIREME_API TensorBox whole_box(at::IntArrayRef sizes);
// Returns "[0:2, 3:4]"; "" for a scalar.
TRIREME_API std::string text_of(const TensorBox& box);
// Returns the elements that both boxes have; nothing if there are none.
TRIREME_API std::optional<TensorBox> intersection(const TensorBox& one, const TensorBox& other);
// Returns disjoint boxes that have the elements of `box` outside of `hole`, which lies inside it.
TRIREME_API std::vector<TensorBox> cut_out(const TensorBox& box, const TensorBox& hole);
// Returns `box`, in row-major order, in boxes of at most `most` elements (> 0).
TRIREME_API std::vector<TensorBox> cut(const TensorBox& box, int64_t most);
// Returns the elements of `box` in a tensor of which `values` are those from `first` on; an empty
// `first` is zero in all dimensions.
TRIREME_API at::Tensor values_in(const at::Tensor& values, const std::vector<int64_t>& first,
                                 const TensorBox& box);

}  // namespace trireme

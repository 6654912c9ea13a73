#include <trireme/saving/tensor_box.h>

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace trireme {

int64_t TensorBox::numel() const { return c10::multiply_integers(sizes); }

TensorBox whole_box(at::IntArrayRef sizes) {
  return {std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
}

std::string text_of(const TensorBox& box) {
  std::string text;
  for (size_t dim = 0; dim < box.first.size(); ++dim)
    text += (dim == 0 ? "[" : ", ") + std::to_string(box.first[dim]) + ":" +
            std::to_string(box.first[dim] + box.sizes[dim]);
  return text.empty() ? text : text + "]";
}

std::optional<TensorBox> intersection(const TensorBox& one, const TensorBox& other) {
  TensorBox both = one;
  for (size_t dim = 0; dim < one.first.size(); ++dim) {
    const int64_t end =
        std::min(one.first[dim] + one.sizes[dim], other.first[dim] + other.sizes[dim]);
    both.first[dim] = std::max(one.first[dim], other.first[dim]);
    both.sizes[dim] = end - both.first[dim];
    if (both.sizes[dim] <= 0) return std::nullopt;
  }
  return both;
}

std::vector<TensorBox> cut_out(const TensorBox& box, const TensorBox& hole) {
  std::vector<TensorBox> outside;
  TensorBox rest = box;  // in the dimensions so far as narrow as the hole
  for (size_t dim = 0; dim < box.first.size(); ++dim) {
    const int64_t end = rest.first[dim] + rest.sizes[dim];
    const int64_t hole_end = hole.first[dim] + hole.sizes[dim];
    const auto add = [&](int64_t first, int64_t size) {
      if (size == 0) return;
      TensorBox& part = outside.emplace_back(rest);
      part.first[dim] = first;
      part.sizes[dim] = size;
    };
    add(rest.first[dim], hole.first[dim] - rest.first[dim]);
    add(hole_end, end - hole_end);
    rest.first[dim] = hole.first[dim];
    rest.sizes[dim] = hole.sizes[dim];
  }
  return outside;
}

std::vector<TensorBox> cut(const TensorBox& box, int64_t most) {
  if (box.numel() <= most) return {box};
  size_t dim = 0;
  while (box.sizes[dim] == 1) ++dim;
  const int64_t slice = box.numel() / box.sizes[dim];
  const int64_t count = std::max<int64_t>(most / slice, 1);
  std::vector<TensorBox> parts;
  for (int64_t done = 0; done < box.sizes[dim]; done += count) {
    TensorBox part = box;
    part.first[dim] += done;
    part.sizes[dim] = std::min(count, box.sizes[dim] - done);
    for (TensorBox& smaller : cut(part, most)) parts.push_back(std::move(smaller));
  }
  return parts;
}

at::Tensor values_in(const at::Tensor& values, const std::vector<int64_t>& first,
                     const TensorBox& box) {
  at::Tensor found = values;
  for (size_t dim = 0; dim < box.first.size(); ++dim) {
    const int64_t begin = box.first[dim] - (first.empty() ? 0 : first[dim]);
    found = found.narrow(static_cast<int64_t>(dim), begin, box.sizes[dim]);
  }
  return found;
}

}  // namespace trireme

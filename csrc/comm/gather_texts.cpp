#include <trireme/comm/gather_texts.h>

#include <ATen/ATen.h>

#include <cstring>

namespace trireme {

std::vector<std::string> gather_texts(const std::string& own, Communicator& communicator,
                                      c10::Device device) {
  const int64_t world = communicator.world();
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  at::Tensor lengths = at::empty({world}, integers);
  const auto length = static_cast<int64_t>(own.size());
  communicator.all_gather({lengths}, {at::full({1}, length, integers)}, "lengths of texts").wait();
  lengths = lengths.cpu();
  const int64_t longest = lengths.max().item<int64_t>();
  std::vector<std::string> texts(static_cast<size_t>(world));
  if (longest == 0) return texts;
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), own.data(), own.size());
  mine = mine.to(device);
  at::Tensor all = at::empty({world * longest}, mine.options());
  communicator.all_gather({all}, {mine}, "texts").wait();
  all = all.cpu();
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto* text = static_cast<const char*>(all.const_data_ptr()) + rank * longest;
    const auto bytes = static_cast<size_t>(lengths.const_data_ptr<int64_t>()[rank]);
    texts[static_cast<size_t>(rank)].assign(text, bytes);
  }
  return texts;
}

std::pair<std::optional<std::vector<std::string>>, bool> differing_texts(const std::string& own,
                                                                         Communicator& communicator,
                                                                         bool flag) {
  const c10::Device device = communicator.device();
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  const auto hash = static_cast<int64_t>(std::hash<std::string>{}(own) & ~size_t{1});
  const int64_t number = hash | (flag ? 1 : 0);
  at::Tensor all = at::empty({communicator.world()}, integers);
  communicator.all_gather({all}, {at::full({1}, number, integers)}, "batch of a step").wait();
  all = all.cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  bool any = false;
  bool are_equal = true;
  for (int64_t rank = 0; rank < communicator.world(); ++rank) {
    any = any || (numbers[rank] & 1) != 0;
    are_equal = are_equal && (numbers[rank] & ~int64_t{1}) == hash;
  }
  if (are_equal) return {std::nullopt, any};
  return {gather_texts(own, communicator, device), any};
}

}  // namespace trireme

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

std::string broadcast_text(const std::string& own, int64_t root, Communicator& communicator,
                           c10::Device device) {
  const bool is_root = communicator.rank() == root;
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor length = at::full({1}, static_cast<int64_t>(own.size()), integers);
  communicator.broadcast({length}, root, "length of a text").wait();
  at::Tensor bytes = at::empty({length.item<int64_t>()}, at::kByte);
  if (bytes.numel() == 0) return {};
  if (is_root) std::memcpy(bytes.mutable_data_ptr(), own.data(), own.size());
  bytes = bytes.to(device);
  communicator.broadcast({bytes}, root, "text of rank " + std::to_string(root)).wait();
  bytes = bytes.cpu();
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

}  // namespace trireme

#include <trireme/comm/packed_value.h>

#include <trireme/comm/tensor_packing.h>
#include <trireme/comm/value_codec.h>
#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace trireme::values {
namespace {

constexpr int64_t kPartAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

// How many bytes the parts take, each without what aligns the next one.
struct Parts {
  int64_t text = 0;
  int64_t description = 0;
  int64_t payload = 0;

  int64_t text_at() const { return kPartAlignment; }
  int64_t description_at() const { return text_at() + aligned(text); }
  int64_t payload_at() const { return description_at() + aligned(description); }
  int64_t total() const { return payload_at() + aligned(payload); }
};
static_assert(sizeof(Parts) <= kPartAlignment);

[[noreturn]] void refuse_packed(const char* got) {
  C10_THROW_ERROR(ValueError, error_text("values", got, {}, "Run the same Trireme on every rank."));
}

// Tensors with memory on the CPU.
std::vector<at::Tensor> on_cpu(std::vector<at::Tensor> tensors) {
  for (at::Tensor& tensor : tensors) tensor = tensor.detach().cpu();
  return tensors;
}

Parts read_parts(const at::Tensor& bytes) {
  const int64_t total = bytes.numel();
  Parts parts;
  if (total < kPartAlignment) refuse_packed("got bytes of a packed value that end too early");
  std::memcpy(&parts, bytes.const_data_ptr(), sizeof(parts));
  // Each alone first, so that no sum overflows.
  for (const int64_t part : {parts.text, parts.description, parts.payload})
    if (part < 0 || part > total)
      refuse_packed("got bytes of a packed value that have a part beyond its bytes");
  if (parts.total() != total || parts.description % static_cast<int64_t>(sizeof(int64_t)) != 0)
    refuse_packed("got bytes of a packed value that have parts of other lengths");
  return parts;
}

// Returns a copy of each tensor: a small one does not keep all of them, and may be resized.
std::vector<at::Tensor> read_tensors(const ArrivedTensors& came) {
  TensorMessage message;
  bool is_described = false;
  try {
    is_described = unpack_tensors(came, message);
    for (at::Tensor& tensor : message.tensors)
      if (tensor.defined()) tensor = tensor.clone();
  } catch (const c10::Error&) {  // of strides that no tensor can have
    is_described = false;
  }
  if (!is_described) refuse_packed("got bytes of a packed value that describe its tensors wrongly");
  return std::move(message.tensors);
}

}  // namespace

at::Tensor pack_value(const Value& value, const ValueOrigin& origin) {
  check_value(value, origin, /*reaches_devices=*/true);
  EncodedValue encoded = encode(value, [&](const Ref&) -> RefAddress {
    C10_THROW_ERROR(TypeError, error_text(origin.area, "got a Ref to pack", origin.where,
                                          "Pass Refs in calls of trireme.remote."));
  });
  TensorMessage message;
  message.tensors = on_cpu(std::move(encoded.tensors));
  TensorPacking packing({{}, 0, origin.name}, /*reaches_devices=*/false);
  packing.plan(message, origin.name);
  const Parts parts{static_cast<int64_t>(encoded.text.size()), packing.description_bytes(),
                    packing.payload_bytes()};
  at::Tensor bytes = at::zeros({parts.total()}, at::kByte);
  auto* memory = static_cast<std::byte*>(bytes.mutable_data_ptr());
  std::memcpy(memory, &parts, sizeof(parts));
  std::memcpy(memory + parts.text_at(), encoded.text.data(), encoded.text.size());
  if (parts.description > 0)
    std::memcpy(memory + parts.description_at(), packing.description().data(),
                static_cast<size_t>(parts.description));
  packing.copy_into(memory + parts.payload_at(), nullptr, message);
  return bytes;
}

Value unpack_value(const at::Tensor& bytes) {
  const Parts parts = read_parts(bytes);
  auto* memory = static_cast<std::byte*>(bytes.data_ptr());
  std::vector<int64_t> description(static_cast<size_t>(parts.description) / sizeof(int64_t));
  if (!description.empty())
    std::memcpy(description.data(), memory + parts.description_at(),
                static_cast<size_t>(parts.description));
  const ArrivedTensors came{description, {memory + parts.payload_at(), parts.payload, nullptr}};
  const std::vector<at::Tensor> tensors = read_tensors(came);
  const std::string_view text(reinterpret_cast<const char*>(memory + parts.text_at()),
                              static_cast<size_t>(parts.text));
  return decode(text, tensors, [](const RefAddress&) -> RefPtr {
    refuse_packed("got bytes of a packed value that have a Ref");
  });
}

}  // namespace trireme::values

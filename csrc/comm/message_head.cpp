#include <trireme/comm/message_head.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kMagic = 0x31646165686d7274;  // "trmhead1"
constexpr int64_t kAlignment = 64;
constexpr int64_t kMostDims = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

[[noreturn]] void refuse_tensor(const std::string& what) {
  TORCH_CHECK_TYPE(false, error_text("tensor_channel", "got " + what + ", expected a dense tensor",
                                     {}, "Convert it before it leaves its stage."));
}

[[noreturn]] void refuse_bytes() {
  C10_THROW_ERROR(DistBackendError,
                  error_text("tensor_channel", "got bytes that are no head of a message", {},
                             "Run the same version of this library on all ranks."));
}

bool has_dense_strides(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

MessageHead::Entry describe(const at::Tensor& tensor) {
  MessageHead::Entry entry;
  if (!tensor.defined()) return entry;
  if (tensor.layout() != at::kStrided)
    refuse_tensor(c10::str("a tensor of layout ", tensor.layout()));
  if (tensor.is_quantized()) refuse_tensor("a quantized tensor");
  if (tensor.is_meta()) refuse_tensor("a tensor on the meta device, which has no values");
  entry.dtype = tensor.scalar_type();
  entry.requires_grad = tensor.requires_grad();
  entry.sizes = tensor.sizes().vec();
  entry.strides = has_dense_strides(tensor) ? tensor.strides().vec()
                                            : at::detail::defaultStrides(tensor.sizes());
  entry.bytes = static_cast<int64_t>(tensor.numel() * tensor.element_size());
  return entry;
}

// Reads numbers from the front of bytes.
class Numbers {
 public:
  explicit Numbers(std::span<const std::byte> bytes) : bytes_(bytes) {}

  int64_t next() {
    int64_t number = 0;
    std::memcpy(&number, take(sizeof(number)).data(), sizeof(number));
    return number;
  }
  int64_t next(int64_t least, int64_t most) {
    const int64_t number = next();
    if (number < least || number > most) refuse_bytes();
    return number;
  }
  std::vector<int64_t> list(int64_t length) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < length; ++i) numbers.push_back(next());
    return numbers;
  }
  std::span<const std::byte> take(size_t count) {
    if (count > bytes_.size()) refuse_bytes();
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  int64_t left() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  std::span<const std::byte> bytes_;
};

// Checks that a dense tensor of these sizes and strides lies in `bytes`.
void check_entry(const MessageHead::Entry& entry, int64_t payload_bytes) {
  uint64_t numel = 1;
  uint64_t last = 0;
  for (size_t i = 0; i < entry.sizes.size(); ++i) {
    if (entry.sizes[i] < 0 || entry.strides[i] < 0) refuse_bytes();
    if (c10::mul_overflows(numel, static_cast<uint64_t>(entry.sizes[i]), &numel)) refuse_bytes();
  }
  for (size_t i = 0; numel > 0 && i < entry.sizes.size(); ++i) {
    uint64_t span = 0;
    const bool overflows = c10::mul_overflows(static_cast<uint64_t>(entry.sizes[i] - 1),
                                              static_cast<uint64_t>(entry.strides[i]), &span) ||
                           c10::add_overflows(last, span, &last);
    if (overflows) refuse_bytes();
  }
  const uint64_t element = c10::elementSize(*entry.dtype);
  uint64_t bytes = 0;
  if (c10::mul_overflows(numel, element, &bytes) || bytes != static_cast<uint64_t>(entry.bytes))
    refuse_bytes();
  const bool is_inside = entry.offset >= 0 && entry.offset % kAlignment == 0 &&
                         entry.offset <= payload_bytes &&
                         entry.bytes <= payload_bytes - entry.offset;
  if (!is_inside || (numel > 0 && last >= numel)) refuse_bytes();
}

}  // namespace

MessageHead MessageHead::of(const TensorMessage& message) {
  MessageHead head{message.step, message.micro_batch, message.text};
  for (const at::Tensor& tensor : message.tensors) {
    Entry& entry = head.entries.emplace_back(describe(tensor));
    entry.offset = head.payload_bytes;
    head.payload_bytes += aligned(entry.bytes);
  }
  return head;
}

int64_t MessageHead::head_bytes() const {
  auto bytes = static_cast<int64_t>(6 * sizeof(int64_t) + text.size());
  for (const Entry& entry : entries)
    bytes += static_cast<int64_t>((5 + 2 * entry.sizes.size()) * sizeof(int64_t));
  return aligned(bytes);
}

void MessageHead::write(std::span<std::byte> to) const {
  std::byte* next = to.data();
  const auto put = [&](int64_t number) {
    std::memcpy(next, &number, sizeof(number));
    next += sizeof(number);
  };
  put(kMagic);
  put(step);
  put(micro_batch);
  put(static_cast<int64_t>(text.size()));
  put(static_cast<int64_t>(entries.size()));
  put(payload_bytes);
  for (const Entry& entry : entries) {
    put(entry.dtype ? static_cast<int64_t>(*entry.dtype) : -1);
    put(entry.requires_grad ? 1 : 0);
    put(static_cast<int64_t>(entry.sizes.size()));
    put(entry.offset);
    put(entry.bytes);
    for (const int64_t size : entry.sizes) put(size);
    for (const int64_t stride : entry.strides) put(stride);
  }
  std::memcpy(next, text.data(), text.size());
}

MessageHead MessageHead::read(std::span<const std::byte> from) {
  Numbers numbers(from);
  if (numbers.next() != kMagic) refuse_bytes();
  MessageHead head;
  head.step = numbers.next();
  head.micro_batch = numbers.next();
  const int64_t text_bytes = numbers.next(0, numbers.left());
  const int64_t entries = numbers.next(0, numbers.left());
  head.payload_bytes = numbers.next(0, INT64_MAX);
  for (int64_t i = 0; i < entries; ++i) {
    Entry& entry = head.entries.emplace_back();
    const int64_t dtype = numbers.next(-1, static_cast<int64_t>(c10::ScalarType::Undefined) - 1);
    entry.requires_grad = numbers.next(0, 1) == 1;
    const int64_t dims = numbers.next(0, kMostDims);
    entry.offset = numbers.next();
    entry.bytes = numbers.next();
    entry.sizes = numbers.list(dims);
    entry.strides = numbers.list(dims);
    if (dtype < 0) continue;
    entry.dtype = static_cast<c10::ScalarType>(dtype);
    check_entry(entry, head.payload_bytes);
  }
  const auto text = numbers.take(static_cast<size_t>(text_bytes));
  head.text.assign(reinterpret_cast<const char*>(text.data()), text.size());
  return head;
}

void MessageHead::pack(const TensorMessage& message, std::byte* payload) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    const Entry& entry = entries[i];
    if (entry.bytes == 0) continue;
    if (tensor.is_cpu() && has_dense_strides(tensor)) {
      std::memcpy(payload + entry.offset, tensor.const_data_ptr(),
                  static_cast<size_t>(entry.bytes));
    } else {
      at::from_blob(payload + entry.offset, entry.sizes, entry.strides,
                    at::TensorOptions().dtype(*entry.dtype))
          .copy_(tensor);
    }
  }
}

TensorMessage MessageHead::unpack(std::byte* payload, const std::function<void()>& release) && {
  const std::shared_ptr<void> hold(payload, [release](void* /*payload*/) { release(); });
  TensorMessage message{step, micro_batch, std::move(text)};
  for (const Entry& entry : entries) {
    message.requires_grad.push_back(entry.requires_grad);
    at::Tensor& tensor = message.tensors.emplace_back();
    if (!entry.dtype) continue;
    tensor = at::from_blob(
        payload + entry.offset, entry.sizes, entry.strides, [hold](void* /*data*/) {},
        at::TensorOptions().dtype(*entry.dtype));
  }
  return message;
}

void check_message(const MessageHead& head, int64_t step, int64_t micro_batch,
                   const std::string& channel, RankOf where) {
  if (head.step == step && head.micro_batch == micro_batch) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text("tensor_channel",
                 channel + ": expected micro-batch " + std::to_string(micro_batch) + " of step " +
                     std::to_string(step) + ", got micro-batch " +
                     std::to_string(head.micro_batch) + " of step " + std::to_string(head.step),
                 where, "All ranks must run the same schedule."));
}

}  // namespace trireme

#include <trireme/comm/tensor_packing.h>

#include <trireme/common/resolved.h>
#include <trireme/shm/reduce.h>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace trireme {
namespace {

// Tensors from this size on would push the sender's data out of the caches.
constexpr size_t kLeavesCaches = size_t{8} << 20;

// Returns a dtype of that many bytes that every operator knows, to copy others bit by bit.
at::ScalarType bits_of(int64_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

at::Tensor as_bits(void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                   const at::TensorOptions& options) {
  return at::for_blob(data, sizes)
      .strides(strides)
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

// Copies a tensor to memory of its device, laid out by `strides`.
void copy_tensor(std::byte* place, const at::Tensor& given, at::IntArrayRef strides) {
  const at::Tensor tensor = is_resolved(given) ? given : resolved(given.detach());
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (tensor.strides() == strides && tensor.is_cpu()) {
    if (tensor.nbytes() < kLeavesCaches) {
      std::memcpy(place, data, tensor.nbytes());
    } else {
      shm::copy_streaming(place, data, static_cast<int64_t>(tensor.nbytes()));
    }
    return;
  }
  const auto bits = at::dtype(bits_of(tensor.element_size())).device(tensor.device());
  as_bits(place, tensor.sizes(), strides, bits)
      .copy_(as_bits(const_cast<std::byte*>(data), tensor.sizes(), tensor.strides(), bits));
}

}  // namespace

std::string ChannelName::sending(const std::string& label) const {
  return "send of " + label + " by channel '" + name + "' to rank " + std::to_string(peer);
}

std::string ChannelName::receiving(const std::string& label) const {
  return "receive of " + label + " by channel '" + name + "' from rank " + std::to_string(peer);
}

void ChannelName::check_came(const TensorMessage& came, int64_t step, int64_t micro_batch,
                             const std::string& label) const {
  if (came.step == step && came.micro_batch == micro_batch) return;
  const auto text = [](int64_t micro_batch, int64_t step) {
    return "micro-batch " + std::to_string(micro_batch) + " of step " + std::to_string(step);
  };
  C10_THROW_ERROR(DistBackendError,
                  error_text(kChannelArea,
                             receiving(label) + " expects " + text(micro_batch, step) + ", got " +
                                 text(came.micro_batch, came.step),
                             where, "Run the same schedule on every rank."));
}

std::string why_not_sent(const at::Tensor& tensor) {
  if (tensor.is_nested()) return "is nested";
  if (tensor.is_quantized())
    return std::string("is quantized (") + c10::toString(tensor.scalar_type()) + ")";
  if (tensor.layout() != c10::kStrided) return "has the layout " + c10::str(tensor.layout());
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch())
    return "is of a subclass that keeps its values in its own way";
  if (tensor.is_meta()) return "is on the device meta and has no values";
  if (!tensor._is_zerotensor() && !tensor.has_storage()) return "has no memory of its own";
  return {};
}

std::string TensorPacking::why_not_sent_here(const at::Tensor& tensor) const {
  if (std::string why = why_not_sent(tensor); !why.empty()) return why;
  if (!tensor.is_cpu() && !reaches_devices_)
    return "is on " + tensor.device().str() + ", but goes through the memory of the host";
  if (!tensor.is_cpu() && device_ && *device_ != tensor.device())
    return "is on " + tensor.device().str() + ", beside others on " + device_->str();
  return {};
}

void TensorPacking::plan(const TensorMessage& message, const std::string& label) {
  packer_.clear();
  device_.reset();
  offsets_.clear();
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    scratch_.is_defined = tensor.defined();
    scratch_.sizes.clear();
    scratch_.strides.clear();
    if (tensor.defined()) {
      const std::string why = why_not_sent_here(tensor);
      TORCH_CHECK_TYPE(
          why.empty(),
          error_text(kChannelArea,
                     name_.sending(label) + " got tensor " + std::to_string(i) + ", which " + why,
                     name_.where, "Send a dense tensor with memory of its own."));
      scratch_.requires_grad = tensor.requires_grad();
      scratch_.is_on_device = !tensor.is_cpu();
      if (!tensor.is_cpu()) device_ = tensor.device();
      scratch_.dtype = static_cast<uint8_t>(tensor.scalar_type());
      scratch_.element_bytes = static_cast<uint8_t>(tensor.element_size());
      scratch_.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
      if (tensor.is_non_overlapping_and_dense()) {
        scratch_.strides.assign(tensor.strides().begin(), tensor.strides().end());
      } else {
        scratch_.strides.resize(scratch_.sizes.size());
        for (int64_t dim = tensor.dim() - 1, step = 1; dim >= 0; --dim) {
          scratch_.strides[static_cast<size_t>(dim)] = step;
          step *= std::max<int64_t>(tensor.size(dim), 1);
        }
      }
    } else {
      scratch_.requires_grad = scratch_.is_on_device = false;
      scratch_.dtype = scratch_.element_bytes = 0;
    }
    offsets_.push_back(packer_.add(scratch_));
  }
}

void TensorPacking::copy_into(std::byte* payload, std::byte* on_device,
                              const TensorMessage& message) const {
  const at::NoGradGuard no_grad;
  // The description has the strides in the payload, behind two words and the sizes.
  size_t word = 0;
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    const at::Tensor& tensor = message.tensors[i];
    if (!tensor.defined()) {
      ++word;
      continue;
    }
    const auto dims = static_cast<size_t>(tensor.dim());
    const at::IntArrayRef strides(description().data() + word + 2 + dims, dims);
    word += 2 + 2 * dims;
    if (tensor.numel() == 0) continue;
    copy_tensor((tensor.is_cpu() ? payload : on_device) + offsets_[i], tensor, strides);
  }
}

bool unpack_tensors(const ArrivedTensors& came, TensorMessage& message) {
  const auto found = shm::unpack(came.description, came.payload.bytes, came.on_device.bytes);
  if (!found) return false;
  for (const shm::PackedTensor& packed : *found) {
    message.requires_grad.push_back(packed.requires_grad);
    if (!packed.is_defined) {
      message.tensors.emplace_back();
      continue;
    }
    const auto dtype = static_cast<at::ScalarType>(packed.dtype);
    if (packed.dtype >= static_cast<uint8_t>(at::ScalarType::Undefined) || c10::isQIntType(dtype) ||
        c10::elementSize(dtype) != packed.element_bytes ||
        (packed.is_on_device && came.device.is_cpu()))
      return false;
    const c10::Device device = packed.is_on_device ? came.device : c10::Device(c10::kCPU);
    const auto options = at::dtype(dtype).device(device);
    if (std::find(packed.sizes.begin(), packed.sizes.end(), 0) != packed.sizes.end()) {
      message.tensors.push_back(at::empty_strided(packed.sizes, packed.strides, options));
      continue;
    }
    const ArrivedPayload& payload = packed.is_on_device ? came.on_device : came.payload;
    const auto free_payload = [](void* keeps) {
      delete static_cast<std::shared_ptr<void>*>(keeps);
    };
    message.tensors.push_back(at::for_blob(payload.memory + packed.offset, packed.sizes)
                                  .strides(packed.strides)
                                  .context(new std::shared_ptr<void>(payload.keeps), free_payload)
                                  .options(options)
                                  .target_device(device)
                                  .make_tensor());
  }
  return true;
}

}  // namespace trireme

#include <trireme/comm/shm_channel.h>

#include <trireme/comm/translate_faults.h>

#include <cstring>
#include <utility>

namespace trireme {

ShmTensorSender::ShmTensorSender(shm::HostGroup& group, const shm::ChannelEnd& end,
                                 ChannelName name, std::shared_ptr<void> keeps)
    : keeps_(std::move(keeps)),
      name_(std::move(name)),
      packing_(name_, /*reaches_devices=*/false),
      slots_(group, end) {}

void ShmTensorSender::send(const TensorMessage& message, const std::string& label) {
  packing_.plan(message, label);
  translate_faults([&] {
    if (slots_.is_full())
      slots_.wait(name_.sending(label) + ", which is not done with as many as it holds");
    shm::MessageHead head;
    head.step = message.step;
    head.micro_batch = message.micro_batch;
    head.description_bytes = packing_.description_bytes();
    head.text_bytes = static_cast<int64_t>(message.text.size());
    head.payload_bytes = packing_.payload_bytes();
    std::byte* slot = slot_for(head.bytes(), label);
    if (head.description_bytes > 0)
      std::memcpy(slot, packing_.description().data(), packing_.description().size() * 8);
    if (head.text_bytes > 0)
      std::memcpy(slot + head.description_bytes, message.text.data(), message.text.size());
    packing_.copy_into(slot + head.payload_begin(), nullptr, message);
    slots_.send(head);
  });
}

std::byte* ShmTensorSender::slot_for(int64_t bytes, const std::string& label) {
  try {
    return slots_.slot_for(bytes);
  } catch (const shm::Fault& fault) {
    if (fault.kind() != shm::FaultKind::kMemory) throw;
    throw shm::Fault(
        fault.kind(),
        error_text(kChannelArea,
                   "got no slot for the " + name_.sending(label) + ": " + fault.what(), name_.where,
                   "Send less at one time (a pipeline: more micro-batches), or let it have more."));
  }
}

ShmTensorReceiver::ShmTensorReceiver(shm::HostGroup& group, const shm::ChannelEnd& end,
                                     ChannelName name, std::shared_ptr<void> keeps)
    : keeps_(std::move(keeps)), name_(std::move(name)), slots_(group, end) {}

void ShmTensorReceiver::forget_before(int64_t step) {
  translate_faults([&] { slots_.forget_before(step); });
}

TensorMessage ShmTensorReceiver::receive(int64_t step, int64_t micro_batch,
                                         const std::string& label) {
  const auto [head, slot] = translate_faults([&] {
    if (slots_.is_empty()) slots_.wait(name_.receiving(label));
    return slots_.take_message();
  });
  TensorMessage message{head.step, head.micro_batch, {}, {}, {}};
  name_.check_came(message, step, micro_batch, label);
  std::byte* memory = slot->data();
  message.text.assign(reinterpret_cast<const char*>(memory + head.description_bytes),
                      static_cast<size_t>(head.text_bytes));
  const ArrivedTensors came{.description = {reinterpret_cast<const int64_t*>(memory),
                                            static_cast<size_t>(head.description_bytes) / 8},
                            .payload = {memory + head.payload_begin(), head.payload_bytes, slot}};
  if (!unpack_tensors(came, message))
    C10_THROW_ERROR(
        DistBackendError,
        error_text(kChannelArea, name_.receiving(label) + " got a description that is none",
                   name_.where, "Run the same Trireme on every rank."));
  return message;
}

}  // namespace trireme

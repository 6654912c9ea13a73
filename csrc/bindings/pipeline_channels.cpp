#include <trireme/bindings/bindings.h>
#include <trireme/comm/communicator.h>
#include <trireme/comm/make_channels.h>
#include <trireme/comm/tensor_channel.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trireme {
namespace {

namespace py = pybind11;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// Ends of channels, and the communicator that they need.
class PythonChannels {
 public:
  using Request = std::tuple<int64_t, int64_t, int64_t, std::string>;

  PythonChannels(std::shared_ptr<Communicator> communicator, const std::vector<Request>& requests)
      : communicator_(std::move(communicator)) {
    std::vector<ChannelRequest> asked;
    for (const auto& [from, to, slots, name] : requests) asked.push_back({from, to, slots, name});
    channels_ = make_channels(*communicator_, std::move(asked));
  }

  void send(size_t index, const std::pair<int64_t, int64_t>& place, std::string text,
            const OptionalTensors& tensors) {
    TensorSender* sender = channels_->sender(index);
    TORCH_CHECK_VALUE(sender != nullptr, "[tensor_channel] this rank does not send there");
    TensorMessage message{place.first, place.second, std::move(text), {}, {}};
    for (const auto& tensor : tensors) message.tensors.push_back(tensor.value_or(at::Tensor()));
    sender->send(message, "a message");
  }

  std::tuple<std::string, OptionalTensors, std::vector<bool>> receive(
      size_t index, const std::pair<int64_t, int64_t>& place) {
    TensorReceiver* receiver = channels_->receiver(index);
    TORCH_CHECK_VALUE(receiver != nullptr, "[tensor_channel] this rank does not receive there");
    TensorMessage message = receiver->receive(place.first, place.second, "a message");
    receiver->done_with_one();
    OptionalTensors tensors;
    for (const at::Tensor& tensor : message.tensors)
      tensors.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
    return {std::move(message.text), std::move(tensors), std::move(message.requires_grad)};
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::unique_ptr<TensorChannels> channels_;
};

}  // namespace

// Binds channels for tests and benchmarks: pipelines use them from C++.
void bind_channels(py::module_& module) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  py::class_<PythonChannels>(module, "TensorChannels")
      .def(py::init<std::shared_ptr<Communicator>, const std::vector<PythonChannels::Request>&>(),
           py::arg("communicator"), py::arg("requests"), WithoutGil())
      .def("send", torch::wrap_pybind_function_no_gil(&PythonChannels::send), py::arg("index"),
           py::arg("place"), py::arg("text"), py::arg("tensors"))
      .def("receive", torch::wrap_pybind_function_no_gil(&PythonChannels::receive),
           py::arg("index"), py::arg("place"));
}

}  // namespace trireme

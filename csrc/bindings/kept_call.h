#pragma once

#include <trireme/activation/checkpoint_frame.h>
#include <trireme/activation/forward_state.h>
#include <trireme/bindings/bindings.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

// A Python function and its arguments, kept for the recomputation. Any thread may drop it.
//
// Tensors among the arguments and in lists, tuples and dicts of any depth (not in subclasses of
// these) are kept by the frame, which detects changes in place. Lists and dicts are copied when
// they are kept and at each call, so neither the function nor its caller changes the arguments of
// the next call; a list or dict that occurs twice is one object in each call. All other arguments,
// and tensors of inference mode, are kept as they are.
class KeptCall : public CheckpointedCall {
 public:
  // `explain` is called with the text of a CheckpointError before that is raised, or None.
  KeptCall(pybind11::object function, const pybind11::tuple& arguments,
           const pybind11::dict& keywords, pybind11::object explain, bool with_random);
  ~KeptCall() override;

  // Moves out the tensors among the arguments.
  std::vector<at::Tensor> take_tensors();

  void run(const std::vector<at::Tensor>& inputs) override;
  std::string name() const override;
  void explain(const std::string& text) const override;

 private:
  struct Python;

  std::unique_ptr<Python> python_;  // dropped with the GIL
  std::vector<at::Tensor> tensors_;
  ForwardState state_;
};

}  // namespace trireme

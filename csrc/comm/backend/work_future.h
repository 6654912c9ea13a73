#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <exception>
#include <vector>

namespace trireme {

// Makes the Future of a Work, whose value is a list of tensors.
inline c10::intrusive_ptr<c10::ivalue::Future> make_work_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

// Completes such a Future with an error, if there is one, or with `outputs`; runs its callbacks.
// Does nothing if it is complete.
inline void complete_future(c10::ivalue::Future& future, const std::exception_ptr& error,
                            const std::vector<at::Tensor>& outputs) {
  if (future.completed()) return;
  error ? future.setError(error) : future.markCompleted(at::IValue(outputs));
}

}  // namespace trireme

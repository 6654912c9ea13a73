#pragma once

#include <trireme/common/export.h>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

namespace trireme {

// The error of the backward in which this is made, to be read afterwards. Autograd destroys the end
// callbacks of a backward that an exception leaves, and does not pass the exception to them.
class TRIREME_API BackwardError {
 public:
  BackwardError();

  // Returns "ValueError: no such file", one line; empty if no error is known, as under an engine
  // that compiles. Takes Python's lock. Never throws.
  std::string text() const noexcept;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> result_;  // null outside of a backward
};

}  // namespace trireme

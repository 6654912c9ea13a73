#pragma once

#include <trireme/common/export.h>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

namespace trireme {

// Knows the backward in which it is made, to tell afterwards what ended it. Autograd destroys the
// end callbacks of a backward that an exception leaves, and says no word of the exception to them.
class TRIREME_API BackwardError {
 public:
  BackwardError();

  // Returns "ValueError: no such file", one line; empty where nothing is known of an error, as
  // under an engine that compiles. Takes Python's lock. Never throws.
  std::string text() const noexcept;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> result_;  // null outside of a backward
};

}  // namespace trireme

#pragma once

#include <trireme/common/export.h>

#include <ATen/record_function.h>

namespace trireme {

// [Note: operators that write what they have saved]
//
// Autograd saves the inputs of an operator before its kernel runs, and its outputs after that. So a
// recomputation may stop when an input is saved, and an input may be offloaded then, unless the
// kernel writes that input. rrelu_with_noise saves the memory for its noise and then fills it, and
// a user's operator may do the same. Its schema shows that: it writes an argument that it does not
// return. (An in-place operator saves a clone before, or the result after.)
//
// A packer is not told which operator saves. Torch's RecordFunction callbacks know, so a thread has
// one while its packer asks for it: some 0.1 us per operator. A recomputation asks for it only near
// its end.

// A scope in which this thread tracks the operators that it has begun in the scope and is in.
class TRIREME_API OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  at::CallbackHandle callback_ = 0;  // set in the outermost watch
};

// Returns whether an operator that this thread is in may still write what it saves. Also true if
// that is unknown: torch's RecordFunction callbacks are off, or no operator has begun since the
// outermost watch, so the thread may be in one that began earlier. False without a watch.
TRIREME_API bool may_write_what_it_saves();

}  // namespace trireme

#pragma once

#include <trireme/common/export.h>

#include <ATen/record_function.h>

namespace trireme {

// [Note: operators that write what they have saved]
//
// Autograd saves the inputs of an operator before its kernel runs, and its outputs after that. So a
// recomputation may stop at an input, and an input may be copied elsewhere as it is: unless the
// kernel writes it. rrelu_with_noise saves the memory for its noise, then fills it, and a user's
// operator may do the same. Its schema says so: it writes an argument that it does not return.
// (What an operator in place returns is saved as a clone before, or as the result after.)
//
// Nobody tells a packer which operator saves. Torch's observers of operators do, so a thread has
// one while its packer asks for it: some 0.1 us for each operator. A recomputation asks near its
// end only.

// While it lives, this thread knows the operators that it has begun since and is in.
class TRIREME_API OperatorWatch {
 public:
  OperatorWatch();
  ~OperatorWatch();
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;

 private:
  at::CallbackHandle callback_ = 0;  // the outermost one has it
};

// Says whether an operator that this thread is in may still write what it saves; also where nothing
// is known, because nobody watches, torch's observers are off, or no operator has begun since one
// watches: it may be that one.
TRIREME_API bool may_write_what_it_saves();

}  // namespace trireme

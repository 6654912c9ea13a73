#pragma once

namespace trireme {

// Is what our hooks answer to compiled autograd, which asks every hook how to trace it. Throws
// NotImplementedError.
[[noreturn]] void refuse_compiled_autograd();

}  // namespace trireme

#pragma once

namespace trireme {

// Answers compiled autograd, which asks every hook how to trace it. Throws NotImplementedError.
[[noreturn]] void refuse_compiled_autograd();

}  // namespace trireme

#pragma once

namespace trireme {

// Throws NotImplementedError for compiled autograd, which asks every hook how to trace it.
[[noreturn]] void refuse_compiled_autograd();

}  // namespace trireme

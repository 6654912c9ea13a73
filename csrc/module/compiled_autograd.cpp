#include <trireme/module/compiled_autograd.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

namespace trireme {

void refuse_compiled_autograd() {
  C10_THROW_ERROR(NotImplementedError,
                  error_text("grad_hook",
                             "got a backward under compiled autograd, expected the eager engine: "
                             "its compiled graph would leave out the reduction of gradients",
                             {}, "Set torch._dynamo.config.compiled_autograd = False."));
}

}  // namespace trireme

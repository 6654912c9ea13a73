#include <trireme/strategies/pipeline/refuse.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

namespace trireme {

void refuse_pipeline(const std::string& got, std::string_view next_step) {
  TORCH_CHECK_VALUE(false, error_text("pipeline", got, {}, next_step));
}

}  // namespace trireme

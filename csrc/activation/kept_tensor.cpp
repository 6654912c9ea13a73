#include <trireme/activation/kept_tensor.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace trireme {

void SavedVersion::refuse(const std::string& tensor) const {
  C10_THROW_ERROR(
      Error, error_text("checkpoint",
                        c10::str("one of the variables needed for gradient computation has been "
                                 "modified by an inplace operation: ",
                                 tensor, " is at version ", now(), ", expected version ", saved_),
                        {},
                        "Change a clone of it, or compute out of place; "
                        "torch.autograd.set_detect_anomaly(True) shows who had saved it."));
}

}  // namespace trireme

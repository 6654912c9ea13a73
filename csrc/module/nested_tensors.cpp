#include <trireme/module/nested_tensors.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

namespace trireme {
namespace {

constexpr const char* kNextStep = "Return the same structure from every forward.";

}  // namespace

void TensorsSideBySide::refuse_length(size_t value, size_t got, size_t expected) const {
  C10_THROW_ERROR(ValueError,
                  error_text("data_parallel",
                             std::string("got an output container of length ") +
                                 std::to_string(got) + " from " + describe_(value) + ", expected " +
                                 std::to_string(expected) + " as from " + describe_(0),
                             {}, kNextStep));
}

void TensorsSideBySide::refuse_keys(size_t value) const {
  C10_THROW_ERROR(ValueError,
                  error_text("data_parallel",
                             std::string("got an output map with other keys from ") +
                                 describe_(value) + ", expected those from " + describe_(0),
                             {}, kNextStep));
}

}  // namespace trireme

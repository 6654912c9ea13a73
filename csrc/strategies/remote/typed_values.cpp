#include <trireme/strategies/remote/typed_values.h>

#include <c10/util/Exception.h>

namespace trireme::remote {

void refuse_value(const Value& value, const std::string& place, const std::string& expected) {
  C10_THROW_ERROR(
      TypeError,
      error_text("remote", "got " + place + " is " + kind_of(value) + ", expected " + expected, {},
                 "Pass what the definition takes."));
}

void refuse_range(int64_t value, const std::string& place) {
  C10_THROW_ERROR(ValueError, error_text("remote",
                                         "got " + std::to_string(value) + " as " + place +
                                             ", which the type of its parameter does not have",
                                         {}, "Pass a number of its range."));
}

}  // namespace trireme::remote

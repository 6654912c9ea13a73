#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>

namespace trireme {

std::string what_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

std::string first_line_of(const std::exception& error) {
  const std::string text = what_of(error);
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme

#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace trireme {
namespace {

std::string (*exception_namer)(const std::exception& error) = nullptr;

}  // namespace

std::string what_of(const std::exception& error) {
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr ? torchs->what_without_backtrace() : error.what();
}

void set_exception_namer(std::string (*namer)(const std::exception& error)) {
  exception_namer = namer;
}

std::string one_line(std::string text) {
  constexpr size_t kMost = 400;
  const size_t begin = std::min(text.find_first_not_of(" \n\t"), text.size());
  text = text.substr(begin, text.find('\n', begin) - begin);
  return text.size() <= kMost ? text : text.substr(0, kMost) + " ...";
}

std::string text_of(const std::exception_ptr& error) noexcept {
  try {
    if (error) std::rethrow_exception(error);
    return {};
  } catch (const std::exception& caught) {
    try {
      std::string text = exception_namer != nullptr ? exception_namer(caught) : std::string();
      return one_line(text.empty() ? what_of(caught) : std::move(text));
    } catch (...) {  // no memory for a text
      return {};
    }
  } catch (...) {
    return "something that is no std::exception";
  }
}

std::string first_line_of(const std::exception& error) {
  const std::string text = what_of(error);
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme

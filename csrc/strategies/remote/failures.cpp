#include <trireme/strategies/remote/failures.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>
#include <trireme/common/interruption.h>

#include <c10/util/Exception.h>

#include <atomic>
#include <stdexcept>
#include <string>

namespace trireme::remote {
namespace {

std::atomic<FailureLanguage*> language_of_process{nullptr};

Failure of_builtin(const char* type, const std::exception& error) {
  std::string text = trireme::what_of(error);
  if (!is_utf8(text))
    for (char& letter : text)
      if (static_cast<unsigned char>(letter) >= 0x80) letter = '?';
  return {type, "builtins", std::move(text), {}, {}};
}

std::string text_for_cpp(const Failure& failure) {
  const bool is_known = failure.type == "RuntimeError" && failure.module == "builtins";
  std::string text = "[remote] " + failure.where + " failed: " + (is_known ? "" : failure.type) +
                     (is_known ? "" : ": ") + failure.text;
  if (!failure.traceback.empty()) text += "\nThere:\n" + failure.traceback;
  return text;
}

}  // namespace

void use_failure_language(FailureLanguage& language) { language_of_process = &language; }

void raise_failure(const Failure& failure) {
  if (FailureLanguage* language = language_of_process) language->raise(failure);
  const std::string text = text_for_cpp(failure);
  if (failure.type == "ValueError") C10_THROW_ERROR(ValueError, text);
  if (failure.type == "TypeError") C10_THROW_ERROR(TypeError, text);
  if (failure.type == "IndexError") C10_THROW_ERROR(IndexError, text);
  if (failure.type == "NotImplementedError") C10_THROW_ERROR(NotImplementedError, text);
  if (failure.type == "DistBackendError") C10_THROW_ERROR(DistBackendError, text);
  C10_THROW_ERROR(Error, text);
}

Failure describe_failure(const std::exception_ptr& error) {
  if (FailureLanguage* language = language_of_process)
    if (auto found = language->describe(error)) return *found;
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError& caught) {
    return of_builtin("ValueError", caught);
  } catch (const c10::TypeError& caught) {
    return of_builtin("TypeError", caught);
  } catch (const c10::IndexError& caught) {
    return of_builtin("IndexError", caught);
  } catch (const c10::NotImplementedError& caught) {
    return of_builtin("NotImplementedError", caught);
  } catch (const c10::DistBackendError& caught) {
    Failure failure = of_builtin("DistBackendError", caught);
    failure.module = "torch.distributed";
    return failure;
  } catch (const std::invalid_argument& caught) {
    return of_builtin("ValueError", caught);
  } catch (const std::out_of_range& caught) {
    return of_builtin("IndexError", caught);
  } catch (const std::exception& caught) {
    return of_builtin("RuntimeError", caught);
  } catch (const Interruption& caught) {
    return {"KeyboardInterrupt", "builtins", caught.reason, {}, {}};
  } catch (...) {
    return {"RuntimeError", "builtins", "an exception of an unknown type", {}, {}};
  }
}

}  // namespace trireme::remote

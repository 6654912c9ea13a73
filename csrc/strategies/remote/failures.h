#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/wire_messages.h>

#include <exception>
#include <optional>

namespace trireme::remote {

// Translates the exceptions of a language besides C++. Called by any thread.
class TRIREME_API FailureLanguage {
 public:
  virtual ~FailureLanguage() = default;
  // Throws this language's exception for a failure of another process.
  [[noreturn]] virtual void raise(const Failure& failure) = 0;
  // Describes an exception; nullopt for one that is not of this language.
  virtual std::optional<Failure> describe(const std::exception_ptr& error) = 0;
};

// `language` lives as long as the process. Called once, before any call.
TRIREME_API void use_failure_language(FailureLanguage& language);

// Throws a call's failure: c10::ValueError, TypeError, IndexError, NotImplementedError and
// DistBackendError if it was one, else c10::Error, which says the type; each says where, and has
// the traceback behind the text. In a program of another language, that language's exception.
[[noreturn]] TRIREME_API void raise_failure(const Failure& failure);

// Describes an exception for the caller; without `where`.
TRIREME_API Failure describe_failure(const std::exception_ptr& error);

}  // namespace trireme::remote

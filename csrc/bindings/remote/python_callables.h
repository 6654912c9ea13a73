#pragma once

#include <trireme/strategies/remote/definitions.h>
#include <trireme/strategies/remote/failures.h>

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>

namespace trireme::remote {

// A Python object. Any thread may drop it.
class PythonHosted final : public Hosted {
 public:
  explicit PythonHosted(pybind11::object object);
  const void* identity() const override { return object_->ptr(); }
  pybind11::object object() const { return *object_; }

 private:
  std::shared_ptr<pybind11::object> object_;
};

// Returns a definition whose calls take the GIL, in a thread state that each thread keeps.
// `callable` is a function, a class, or the function of a method.
Definition definition_of_python(Definition made, pybind11::object callable);

// Converts Python exceptions by two Python functions: `raiser(type, module, text, traceback,
// where)` raises, and `describer(exception)` returns (type, module, text, traceback).
class PythonFailures final : public FailureLanguage {
 public:
  static PythonFailures& of_process();
  void use_raiser(pybind11::object raiser);
  void use_describer(pybind11::object describer);

  [[noreturn]] void raise(const Failure& failure) override;
  std::optional<Failure> describe(const std::exception_ptr& error) override;

 private:
  pybind11::object* raiser_ = nullptr;  // lives as long as the process
  pybind11::object* describer_ = nullptr;
};

}  // namespace trireme::remote

#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme::remote {

// An object that other ranks call. Several threads may call its methods at one time.
class TRIREME_API Hosted {
 public:
  virtual ~Hosted() = default;
  // Tells objects apart: an object that is shown twice has one identity. Null: each is another
  // object.
  virtual const void* identity() const { return nullptr; }
};

// A module that a factory returns, in whatever language. Any thread calls it; several call
// forward() at one time, set_training() is called by one alone.
class TRIREME_API ModuleBody {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  virtual ~ModuleBody() = default;
  // Tells modules apart: a module that a factory returns twice has one identity.
  virtual const void* identity() const = 0;
  virtual Value forward(const Values& args, const Dict& kwargs) = 0;
  // Returns each tensor once, under its first name.
  virtual Named parameters() = 0;
  // Returns the tensors of a state dict, under all names: parameters and buffers themselves, not
  // detached.
  virtual Named state() = 0;
  virtual void set_training(bool training) = 0;
};

}  // namespace trireme::remote

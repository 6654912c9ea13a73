#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme::remote {

// Is an object that other ranks call. Its methods may be called by several threads at one time.
class TRIREME_API Hosted {
 public:
  virtual ~Hosted() = default;
  // Tells objects apart: one that is shown twice is one object. Null: each is another one.
  virtual const void* identity() const { return nullptr; }
};

// Is what a factory of modules returns, in whatever language. Any thread calls it; forward() is
// called by several at one time, set_training() and load() by one alone.
class TRIREME_API ModuleBody {
 public:
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  virtual ~ModuleBody() = default;
  // Tells modules apart: what a factory returns twice is one module.
  virtual const void* identity() const = 0;
  virtual Value forward(const Values& args, const Dict& kwargs) = 0;
  // Returns each tensor once, under its first name.
  virtual Named parameters() = 0;
  // Returns what a state dict has, under all names: parameters and buffers themselves, not
  // detached.
  virtual Named state() = 0;
  virtual void set_training(bool training) = 0;
};

}  // namespace trireme::remote

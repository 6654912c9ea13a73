#pragma once

#include <trireme/comm/value_codec.h>
#include <trireme/common/export.h>

#include <functional>
#include <utility>

namespace trireme::values {

// A reference to an object of some rank, which lives as long as any Ref to it does. Any thread may
// destroy it.
class TRIREME_API Ref {
 public:
  using LetGo = std::function<void(const RefAddress& address)>;

  // `let_go` does not throw; it is called once, by the destructor.
  Ref(RefAddress address, LetGo let_go)
      : address_(std::move(address)), let_go_(std::move(let_go)) {}
  ~Ref() {
    if (let_go_) let_go_(address_);
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;

  const RefAddress& address() const { return address_; }

 private:
  RefAddress address_;
  LetGo let_go_;
};

}  // namespace trireme::values

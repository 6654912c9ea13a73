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
  using Release = std::function<void(const RefAddress& address)>;

  // `release` does not throw; it is called once, by the destructor.
  Ref(RefAddress address, Release release)
      : address_(std::move(address)), release_(std::move(release)) {}
  ~Ref() {
    if (release_) release_(address_);
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;

  const RefAddress& address() const { return address_; }

 private:
  RefAddress address_;
  Release release_;
};

}  // namespace trireme::values

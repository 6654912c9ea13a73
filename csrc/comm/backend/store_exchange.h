#pragma once

#include <trireme/shm/host_group.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>
#include <utility>

namespace trireme {

// A c10d Store as shm/ uses it.
class StoreExchange final : public shm::Exchange {
 public:
  StoreExchange(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience)
      : store_(std::move(store)), patience_(patience) {}

  void put(const std::string& key, const std::string& text) override {
    store_->set(key, std::vector<uint8_t>(text.begin(), text.end()));
  }
  std::string get(const std::string& key) override {
    store_->wait({key}, patience_);
    const std::vector<uint8_t> bytes = store_->get(key);
    return {bytes.begin(), bytes.end()};
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds patience_;
};

}  // namespace trireme

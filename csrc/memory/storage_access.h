#pragma once

#include <c10/core/StorageImpl.h>

#include <string>
#include <utility>

namespace trireme {

// Memory that is not there for a time. Whoever asks torch for its address meanwhile gets a
// c10::Error of that text, in place of address 0. Where torch's storages cannot be told to allow it
// again, nothing is refused: those of torch 2.11.

template <typename Storage>
concept RefusesAccess = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
  storage.throw_on_immutable_data_ptr();
};

template <typename Storage>
void refuse_access(Storage& storage, std::string text) {
  if constexpr (RefusesAccess<Storage>)
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
}

template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (RefusesAccess<Storage>) storage.clear_data_ptr_access_error_msg_();
}

template <typename Storage>
bool allows_access(Storage& storage) {
  if constexpr (RefusesAccess<Storage>) return !storage.throw_on_immutable_data_ptr();
  return true;
}

}  // namespace trireme

#include <trireme/comm/store_texts.h>

#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <exception>
#include <vector>

namespace trireme {
namespace {

[[noreturn]] void refuse(const std::string& key, const std::exception& error) {
  C10_THROW_ERROR(DistBackendError,
                  error_text("store", "got no answer about '" + key + "': " + what_of(error), {},
                             "Look whether who is to put it there has done so, in this Store."));
}

}  // namespace

void put_text(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key,
              const std::string& text) {
  try {
    store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
  } catch (const std::exception& error) {
    refuse(key, error);
  }
}

std::string get_text(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key) {
  try {
    const std::vector<uint8_t> bytes = store->get(key);
    return {bytes.begin(), bytes.end()};
  } catch (const std::exception& error) {
    refuse(key, error);
  }
}

}  // namespace trireme

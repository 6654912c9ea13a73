#pragma once

#include <trireme/common/export.h>

#include <c10/util/intrusive_ptr.h>

#include <string>

namespace c10d {
class Store;
}

namespace trireme {

// Put a text into a Store, and return one, waiting for it as long as the Store's timeout says.
// Throw c10::DistBackendError with the Store's error if it fails.
TRIREME_API void put_text(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key,
                          const std::string& text);
TRIREME_API std::string get_text(const c10::intrusive_ptr<c10d::Store>& store,
                                 const std::string& key);

}  // namespace trireme

#include <trireme/common/sibling_library.h>

#include <algorithm>
#include <dlfcn.h>
#include <filesystem>

namespace trireme {
namespace {

std::filesystem::path sibling_path(const std::string& part) {
  Dl_info self{};
  if (dladdr(reinterpret_cast<const void*>(&find_in_sibling), &self) == 0) return {};
  const std::filesystem::path own(self.dli_fname);
  const std::string stem = "libtrireme";
  const std::string name = own.filename().string();
  const std::string suffix = name.substr(std::min(stem.size(), name.size()));
  return own.parent_path() / (stem + "_" + part + suffix);
}

}  // namespace

SiblingSymbol find_in_sibling(const std::string& part, const char* name) {
  void* library = dlopen(sibling_path(part).c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = library != nullptr ? dlsym(library, name) : nullptr;
  if (symbol != nullptr) return {.address = symbol, .why_not = {}};
  const char* text = dlerror();
  return {.address = nullptr, .why_not = text != nullptr ? text : "the symbol is empty"};
}

}  // namespace trireme

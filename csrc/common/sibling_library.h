#pragma once

#include <trireme/common/export.h>

#include <string>

namespace trireme {

// A symbol of libtrireme_<part><suffix>.so beside libtrireme<suffix>.so, of the same build: a
// library for code that needs others which not every machine has (NCCL, the CUDA runtime).
struct SiblingSymbol {
  void* address = nullptr;
  std::string why_not;  // the loader's text, if `address` is nullptr
};

// Finds the C function `name` of the sibling `part`, which is opened by the first call and stays
// open. Any thread may call it; repeated calls cost a lookup.
TRIREME_API SiblingSymbol find_in_sibling(const std::string& part, const char* name);

}  // namespace trireme

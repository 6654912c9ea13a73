#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/hosted.h>
#include <trireme/strategies/remote/value.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::remote {

// The arguments of a function or a method. `object` is null but for methods.
struct Invocation {
  Hosted* object = nullptr;
  const Values& args;
  const Dict& kwargs;
};

// A function, class or method that other ranks may call.
struct Definition {
  enum class Kind { kFunction, kClass, kMethod };

  std::string name = {};  // "add"; "Observer"; "Observer.act"
  Kind kind = Kind::kFunction;
  std::string language = {};    // "Python", "C++"
  std::string parameters = {};  // "(a, b=2)", for comparisons
  int64_t count = -1;           // parameters, where their number is fixed
  std::string place = {};       // source location: a definition of the same place replaces it
  int64_t batch = 0;            // number of calls served at once; 0: each by itself

  // Calls a function or a method; absent for a class.
  std::function<Value(const Invocation& call)> call = {};
  // Makes an object of a class.
  std::function<std::shared_ptr<Hosted>(const Invocation& call)> make_object = {};
  // Calls a function that returns a module; absent where it returns none.
  std::function<std::shared_ptr<ModuleBody>(const Invocation& call)> make_module = {};

  // Returns one line with all data that ranks compare.
  std::string text() const;
};

TRIREME_API const char* text_of(Definition::Kind kind);

// The definitions of this process. Thread-safe.
class TRIREME_API Definitions {
 public:
  static Definitions& of_process();

  // Throws c10::ValueError for an invalid name. A second definition of a name replaces the first if
  // it was written at the same place; else both are kept, and start() refuses them.
  void add(Definition definition);
  // Returns null for a name that is not defined. The returned definition does not change.
  std::shared_ptr<const Definition> find(std::string_view name) const;
  std::vector<std::string> names(Definition::Kind kind) const;
  // Returns texts by name; the text of a name that was defined twice says so.
  std::vector<std::string> texts() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<const Definition>>, std::less<>> all_;
};

// One rank's definition, read from its text.
struct DefinitionText {
  std::string name = {};
  std::string kind = {};  // "function", "class", "method"
  std::string language = {};
  std::string parameters = {};
  int64_t count = -1;
  int64_t batch = 0;
  bool is_double = false;
};
TRIREME_API std::vector<DefinitionText> read_definitions(const std::string& text);

// Compares the ranks' definitions: returns what is wrong, the same on all ranks; empty if nothing
// is. A name that only some ranks have defined is no difference.
TRIREME_API std::string difference_of(const std::vector<std::vector<DefinitionText>>& by_rank,
                                      const std::vector<std::string>& names);

// Returns "'a', 'b' and 'c'"; "nothing" for none.
TRIREME_API std::string list_of(const std::vector<std::string>& names);

}  // namespace trireme::remote

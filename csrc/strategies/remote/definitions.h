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

// Is what a function or a method is called with. `object` is null but for methods.
struct Invocation {
  Hosted* object = nullptr;
  const Values& args;
  const Dict& kwargs;
};

// Describes what other ranks may call, and does it.
struct Definition {
  enum class Kind { kFunction, kClass, kMethod };

  std::string name = {};  // "add"; "Observer"; "Observer.act"
  Kind kind = Kind::kFunction;
  std::string language = {};    // "Python", "C++"
  std::string parameters = {};  // "(a, b=2)", for comparisons
  int64_t count = -1;           // parameters, where their number is fixed
  std::string place = {};       // where it was written: one that is defined there again replaces it
  int64_t batch = 0;            // so many calls at once; 0: each by itself

  // Is absent for a class.
  std::function<Value(const Invocation& call)> call = {};
  // Makes an object of a class.
  std::function<std::shared_ptr<Hosted>(const Invocation& call)> make_object = {};
  // Calls a function that returns a module; absent where it returns none.
  std::function<std::shared_ptr<ModuleBody>(const Invocation& call)> make_module = {};

  // Returns one line that says all that ranks compare.
  std::string text() const;
};

TRIREME_API const char* text_of(Definition::Kind kind);

// Holds what this process has defined. Thread-safe.
class TRIREME_API Definitions {
 public:
  static Definitions& of_process();

  // Throws c10::ValueError for a name that is none. One of a name that is there already is kept
  // beside it, and start() refuses both, unless it was written at the same place.
  void add(Definition definition);
  // Returns null for a name that nobody has defined. What it returns stays as it is.
  std::shared_ptr<const Definition> find(std::string_view name) const;
  std::vector<std::string> names(Definition::Kind kind) const;
  // Returns texts by name; those that were defined twice say so.
  std::vector<std::string> texts() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<std::shared_ptr<const Definition>>, std::less<>> all_;
};

// Is what one rank says of one definition, read again from its text.
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

// Compares what ranks have defined: returns what is wrong, the same on all ranks; empty if nothing
// is. What only some have defined is no difference.
TRIREME_API std::string difference_of(const std::vector<std::vector<DefinitionText>>& by_rank,
                                      const std::vector<std::string>& names);

// Says "'a', 'b' and 'c'"; "nothing" for none.
TRIREME_API std::string list_of(const std::vector<std::string>& names);

}  // namespace trireme::remote

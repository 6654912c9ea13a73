#include <trireme/strategies/remote/typed_definitions.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

namespace trireme::remote {

void check_arguments(const Values& args, const Dict& kwargs, size_t count) {
  TORCH_CHECK_TYPE(kwargs.keys.empty(),
                   error_text("remote", "got keyword arguments for a definition of C++", {},
                              "Pass arguments by position."));
  TORCH_CHECK_TYPE(args.size() == count,
                   error_text("remote",
                              "got " + std::to_string(args.size()) + " arguments, expected " +
                                  std::to_string(count),
                              {}, "Pass what the definition takes."));
}

}  // namespace trireme::remote

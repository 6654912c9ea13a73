#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/remote/value.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::remote {

// The messages between processes: one byte for the kind, a number of 8 bytes, and a value
// (value_codec.h) that the structs below describe. The number is the call's, for counts and drops
// the object's.
enum class MessageKind : uint8_t { kCall = 1, kAnswer, kFailure, kGivenUp, kCount, kDrop, kBye };

// The kind of a call. Verbs behind kMakeModule go to the session of a module
// (remote_module_session.h).
enum class Verb : int64_t {
  kFunction,
  kCreate,
  kMethod,
  kMakeModule,
  kForward,
  kBackward,
  kStep,
  kZeroGrad,
  kState,
  kLoad,
  kParameters,
};
inline constexpr int64_t kVerbs = static_cast<int64_t>(Verb::kParameters) + 1;

struct CallMessage {
  Verb verb = Verb::kFunction;
  std::string name = {};    // of the definition; for a module, of its factory
  int64_t object = -1;      // -1: none
  int64_t session = 0;      // the owner's
  int64_t timeout_ms = -1;  // how long the caller waits
  Values args = {};
  Dict kwargs = {};
};

// Returns the text of a call: "function add", "method act of Observer", "forward of make_net".
TRIREME_API std::string what_of(Verb verb, const std::string& name);

// The exception that ended a call at its callee.
struct Failure {
  std::string type = {};    // "ValueError"
  std::string module = {};  // "builtins"
  std::string text = {};
  std::string traceback = {};
  std::string where = {};  // "function add at p1 (rank 1)"
};

// A change of the number of Refs that a rank has of an object.
struct CountMessage {
  int64_t holder = 0;
  int64_t change = 0;
  int64_t session = 0;
};

struct Head {
  MessageKind kind = MessageKind::kBye;
  int64_t number = 0;
};

// Throws c10::ValueError: "got a message of another form". `what` says what is wrong with the
// message.
[[noreturn]] TRIREME_API void refuse_message(const char* what);

// Returns the bytes of a message, whose value is made by the functions below.
TRIREME_API EncodedValue encode_message(const Head& head, const Value& value,
                                        const AddressOf& address_of);
// Read a message; throw c10::ValueError for invalid bytes.
TRIREME_API Head read_head(std::string_view text);
TRIREME_API Value read_value(std::string_view text, const std::vector<at::Tensor>& tensors,
                             const AdoptRef& adopt);

TRIREME_API Value to_value(CallMessage call);
TRIREME_API Value to_value(const Failure& failure);
TRIREME_API Value to_value(const CountMessage& count);
// Throw c10::ValueError for a value of another form.
TRIREME_API CallMessage call_of(Value value);
TRIREME_API Failure failure_of(const Value& value);
TRIREME_API CountMessage count_of(const Value& value);

}  // namespace trireme::remote

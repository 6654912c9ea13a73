#include <trireme/activation/operator_watch.h>

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

// See [Note: operators that write what they have saved] in operator_watch.h.

namespace trireme {
namespace {

thread_local int watches = 0;
thread_local bool has_seen_any = false;
thread_local std::vector<const at::RecordFunction*> operators;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& entered) {
  has_seen_any = true;
  operators.push_back(&entered);
  return nullptr;
}

// Searches the whole stack: ranges that users record may end out of order.
void leave(const at::RecordFunction& left, at::ObserverContext* /*unused*/) {
  const auto found = std::find(operators.rbegin(), operators.rend(), &left);
  if (found != operators.rend()) operators.erase(std::next(found).base());
}

bool writes_what_it_keeps(const at::RecordFunction& one) {
  const std::optional<c10::FunctionSchema> schema = one.operator_schema();
  if (!schema) return false;  // a user's function, which saves at its end
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto written = [&](const std::vector<c10::Argument>& all) {
    return std::count_if(all.begin(), all.end(), is_written);
  };
  return written(schema->arguments()) > written(schema->returns());
}

}  // namespace

OperatorWatch::OperatorWatch() {
  if (watches++ > 0) return;
  has_seen_any = false;
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::FUNCTION}));
}

OperatorWatch::~OperatorWatch() {
  --watches;
  if (callback_ != 0) at::removeCallback(callback_);
}

bool may_write_what_it_saves() {
  if (watches == 0) return false;
  if (!has_seen_any || !at::isRecordFunctionEnabled()) return true;
  return std::any_of(operators.begin(), operators.end(),
                     [](const at::RecordFunction* one) { return writes_what_it_keeps(*one); });
}

}  // namespace trireme

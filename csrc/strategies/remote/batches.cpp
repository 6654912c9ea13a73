#include <trireme/strategies/remote/batches.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace trireme::remote {
namespace {

const std::string& text_of(const Value& key) { return std::get<std::string>(key.content); }

// Returns the argument that a call has for a keyword.
const Value& keyword(const ServedCall& call, const std::string& name) {
  const Dict& kwargs = call.call.kwargs;
  for (size_t i = 0; i < kwargs.keys.size(); ++i)
    if (text_of(kwargs.keys[i]) == name) return kwargs.values[i];
  C10_THROW_ERROR(ValueError,
                  error_text("remote", "got calls of one batch with and without '" + name + "'", {},
                             "Pass the same arguments in every call."));
}

}  // namespace

Batches::Gathered Batches::add(const Definition& definition, ServedCall call) {
  const std::lock_guard lock(mutex_);
  const Key key{call.object.get(), definition.name};
  auto& waiting = waiting_[key];
  const auto now = shm::Clock::now();
  const auto late =
      std::stable_partition(waiting.begin(), waiting.end(),
                            [&](const ServedCall& other) { return other.deadline > now; });
  Gathered gathered;
  std::move(late, waiting.end(), std::back_inserter(gathered.late));
  waiting.erase(late, waiting.end());
  waiting.push_back(std::move(call));
  if (static_cast<int64_t>(waiting.size()) < definition.batch) return gathered;
  gathered.calls = std::move(waiting_.extract(key).mapped());
  return gathered;
}

void Batches::forget(int64_t rank) {
  drop([&](const ServedCall& call) { return call.from == rank; });
}

void Batches::forget(int64_t rank, int64_t number) {
  drop([&](const ServedCall& call) { return call.from == rank && call.number == number; });
}

template <typename IsGone>
void Batches::drop(const IsGone& is_gone) {
  std::vector<ServedCall> dropped;  // destroyed without the lock
  const std::lock_guard lock(mutex_);
  for (auto& [key, waiting] : waiting_) {
    const auto from = std::stable_partition(waiting.begin(), waiting.end(),
                                            [&](const auto& call) { return !is_gone(call); });
    std::move(from, waiting.end(), std::back_inserter(dropped));
    waiting.erase(from, waiting.end());
  }
  std::erase_if(waiting_, [](const auto& entry) { return entry.second.empty(); });
}

Values call_batch(const Definition& definition, const std::vector<ServedCall>& calls) {
  const CallMessage& first = calls.front().call;
  Values args;
  for (size_t place = 0; place < first.args.size(); ++place) {
    List column;
    for (const ServedCall& served : calls) {
      TORCH_CHECK_VALUE(served.call.args.size() == first.args.size() &&
                            served.call.kwargs.keys.size() == first.kwargs.keys.size(),
                        error_text("remote", "got calls of one batch with other arguments", {},
                                   "Pass the same arguments in every call."));
      column.items.push_back(served.call.args[place]);
    }
    args.emplace_back(std::move(column));
  }
  Dict kwargs;
  for (const Value& key : first.kwargs.keys) {
    List column;
    for (const ServedCall& served : calls) column.items.push_back(keyword(served, text_of(key)));
    kwargs.keys.push_back(key);
    kwargs.values.emplace_back(std::move(column));
  }
  Value result = definition.call({calls.front().object.get(), args, kwargs});
  const auto* list = result.get_if<List>();
  const auto* tuple = result.get_if<Tuple>();
  const Values* results = list != nullptr    ? &list->items
                          : tuple != nullptr ? &tuple->items
                                             : nullptr;
  TORCH_CHECK_TYPE(
      results != nullptr && results->size() == calls.size(),
      error_text("remote",
                 "got " +
                     (results == nullptr ? std::string(kind_of(result))
                                         : std::to_string(results->size()) + " results") +
                     " of " + definition.name + " for a batch of " + std::to_string(calls.size()) +
                     " calls, expected a list of as many",
                 {}, "Return one result per call."));
  return *results;
}

}  // namespace trireme::remote

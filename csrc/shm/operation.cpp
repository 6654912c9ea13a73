#include <trireme/shm/operation.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace trireme::shm {
namespace {

uint64_t hash_of(std::string_view text) {
  uint64_t hash = text.size();
  for (; text.size() >= 8; text.remove_prefix(8)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data(), 8);
    hash = mix(hash, word);
  }
  uint64_t rest = 0;
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(&rest));
  return mix(hash, rest);
}

bool reduces(Verb verb) {
  return verb == Verb::kAllReduce || verb == Verb::kReduce || verb == Verb::kReduceScatter;
}

}  // namespace

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

std::string_view name(Verb verb) {
  switch (verb) {
    case Verb::kAllReduce:
      return "all_reduce";
    case Verb::kReduce:
      return "reduce";
    case Verb::kReduceScatter:
      return "reduce_scatter";
    case Verb::kAllGather:
      return "all_gather";
    case Verb::kBroadcast:
      return "broadcast";
    case Verb::kGather:
      return "gather";
    case Verb::kScatter:
      return "scatter";
    case Verb::kAllToAll:
      return "all_to_all";
    case Verb::kBarrier:
      return "barrier";
    case Verb::kShare:
      return "share";
    case Verb::kDeposit:
      return "deposit";
    case Verb::kRefused:
      return "refused";
    case Verb::kNone:
      break;
  }
  return "nothing";
}

std::string Operation::to_string() const {
  if (verb == Verb::kRefused) return "refused: " + std::string(label);
  std::string text(name(verb));
  if (verb != Verb::kBarrier && verb != Verb::kNone)
    text += " of " + std::to_string(count) + " " + std::string(shm::name(dtype));
  if (reduces(verb)) text += " by " + std::string(shm::name(op));
  if (root >= 0) text += " with root " + std::to_string(root);
  if (!label.empty()) text += " '" + std::string(label) + "'";
  return text;
}

void Record::write(uint64_t number, const Operation& operation) {
  sequence = number;
  count = operation.count;
  root = operation.root;
  verb = operation.verb;
  dtype = operation.dtype;
  op = operation.op;
  factor = operation.factor;
  label_length = static_cast<uint8_t>(std::min(operation.label.size(), label.size()));
  std::copy_n(operation.label.begin(), label_length, label.begin());
  const uint64_t kinds = static_cast<uint64_t>(verb) << 16 | static_cast<uint64_t>(dtype) << 8 |
                         static_cast<uint64_t>(op);
  const uint64_t numbers =
      mix(mix(mix(kinds, static_cast<uint64_t>(root)), static_cast<uint64_t>(count)),
          operation.shapes_hash);
  fingerprint = mix(numbers, hash_of(operation.label));
  started_ns = std::chrono::steady_clock::now().time_since_epoch().count();
  finished_ns.store(0, std::memory_order_relaxed);
}

Operation Record::operation() const {
  Operation operation;
  operation.verb = verb;
  operation.dtype = dtype;
  operation.op = op;
  operation.root = root;
  operation.count = count;
  operation.label = {label.data(), std::min<size_t>(label_length, label.size())};
  return operation;
}

std::string step_text(uint64_t begun, uint64_t done) {
  if (begun > done) return " in step " + std::to_string(begun);
  return done > 0 ? " after step " + std::to_string(done) : std::string();
}

std::string describe_mismatch(int64_t rank, const Record& mine, int64_t peer,
                              const Record& theirs) {
  const auto what = [](const Record& record) {
    return (record.verb == Verb::kRefused ? "" : "called ") + record.operation().to_string();
  };
  std::string own = what(mine);
  std::string other = what(theirs);
  if (own == other) {
    own += " of some shapes";
    other += " of other shapes or with a label that differs later on";
  }
  return "rank " + std::to_string(rank) + " " + own + ", rank " + std::to_string(peer) + " " +
         other;
}

}  // namespace trireme::shm

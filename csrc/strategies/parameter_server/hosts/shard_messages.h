#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <cstdint>
#include <string>

namespace trireme::ps {

// A worker's request to a server on another host; tensors go beside it.
//
//   kPull    dense: nothing; rows: ids         answer: tensors of the share; rows
//   kPush    dense: gradients of the share, some undefined; rows: ids and gradients
//   kSetRate, kClock
//   kIds     answer: ids of the share's rows
//   kSave    answer: tensors of all tables' shares, to the worker that saves; see shard_server.h
//   kLeave   nothing more comes from this worker
struct ShareRequest {
  enum class Verb : int64_t { kPull, kPush, kSetRate, kClock, kIds, kSave, kLeave };

  Verb verb = Verb::kPull;
  int64_t table = 0;
  int64_t ticket = -1;  // names the answer; -1: none is wanted
  double number = 1;    // the scale of a push, or a learning rate
  bool create = true;   // whether a pull makes rows
  LineState state = LineState::kLeft;
  std::string word = {};  // the error that ended the worker
};

// A server's answer. The error is of the request, or of an earlier request without an answer.
struct ShareAnswer {
  int64_t ticket = -1;
  std::string error = {};
};

// Write and read messages as JSON. Throw ValueError for any other text.
TRIREME_API std::string to_text(const ShareRequest& request);
TRIREME_API std::string to_text(const ShareAnswer& answer);
TRIREME_API ShareRequest share_request_of(const std::string& text);
TRIREME_API ShareAnswer share_answer_of(const std::string& text);

}  // namespace trireme::ps

#pragma once

#include <trireme/comm/message_box.h>
#include <trireme/comm/requests.h>
#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/parameter_server/hosts/shard_messages.h>
#include <trireme/strategies/parameter_server/progress_table.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// A host's answer, once it has come.
struct AnswerOfHost {
  int64_t host = 0;
  bool has_come = false;
  std::string error = {};
  std::vector<at::Tensor> tensors = {};
};
using RemoteAnswer = std::shared_ptr<AnswerOfHost>;
using RemoteAnswers = std::vector<RemoteAnswer>;

// A worker's link to the shares of other hosts; see [Note: a table on several hosts] in
// table_shares.h. Called by the thread that has the worker's lock. A wait whose context says so
// lets the worker's other threads in.
class TRIREME_API ShardClient {
 public:
  struct Parts {
    std::shared_ptr<MessageBox> box;
    std::shared_ptr<ProgressTable> board;
    int64_t own_host = 0;
    std::vector<int64_t> servers;       // the ranks that serve this worker, by host
    std::chrono::milliseconds limit{};  // of one wait
  };
  // Makes waits of the board end, too, when a server is gone.
  explicit ShardClient(Parts parts);
  ~ShardClient();
  ShardClient(const ShardClient&) = delete;
  ShardClient& operator=(const ShardClient&) = delete;

  int64_t hosts() const { return static_cast<int64_t>(parts_.servers.size()); }
  int64_t own_host() const { return parts_.own_host; }
  // Returns all hosts but this one.
  std::vector<int64_t> others() const;

  using Tensors = std::vector<at::Tensor>;
  // Sends a request; ask() sets its ticket. Waits while there is no room. Throws DistBackendError
  // if that server is gone.
  void tell(int64_t host, const ShareRequest& request, Tensors tensors, const WaitContext& context);
  RemoteAnswer ask(int64_t host, ShareRequest request, Tensors tensors, const WaitContext& context);
  // Sends the same to all other hosts.
  void tell_all(const ShareRequest& request, const WaitContext& context);

  // Returns whether an answer has come. Throws DistBackendError if a server is gone.
  bool has_come(const AnswerOfHost& answer, const WaitContext& context);
  // Waits for an answer. Throws DistBackendError with the server's error, or if the server is gone
  // or does not answer; and what a signal handler raised.
  Tensors wait(const AnswerOfHost& answer, const WaitContext& context);

  // Takes leave of all servers, and waits until they have taken all messages. Never throws.
  void leave(LineState state, std::string_view word) noexcept;

 private:
  void take_answers();
  void check(const WaitContext& context);
  [[noreturn]] void refuse_gone(int64_t host, const std::string& how, const WaitContext& context);
  void wait_until(int64_t host, const WaitContext& context, const std::function<bool()>& is_done);
  void sleep(uint32_t seen, const WaitContext& context);
  std::string name_of(int64_t host) const;

  Parts parts_;
  OpenRequests<AnswerOfHost> asked_;
  // By the rank of a server: the error that ended it, and the time at which it was found gone.
  std::map<int64_t, std::string> last_words_;
  std::map<int64_t, shm::Clock::time_point> gone_since_;
  shm::Clock::time_point looked_at_;
};

}  // namespace trireme::ps

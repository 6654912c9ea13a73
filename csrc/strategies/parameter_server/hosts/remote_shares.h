#pragma once

#include <trireme/comm/message_box.h>
#include <trireme/common/export.h>
#include <trireme/shm/flag_wait.h>
#include <trireme/strategies/parameter_server/clock_board.h>
#include <trireme/strategies/parameter_server/hosts/share_messages.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace trireme::ps {

// Is what a host answers, once it has come.
struct AnswerOfHost {
  int64_t host = 0;
  bool has_come = false;
  std::string error = {};
  std::vector<at::Tensor> tensors = {};
};
using RemoteAnswer = std::shared_ptr<AnswerOfHost>;
using RemoteAnswers = std::vector<RemoteAnswer>;

// Is how one worker, or a rank that serves, reaches the shares of other hosts; see [Note: a table
// on several hosts] in table_shares.h. Called by the thread that has the worker's lock. A wait
// whose errand says so lets others in.
class TRIREME_API RemoteShares {
 public:
  struct Parts {
    std::shared_ptr<MessageBox> box;
    std::shared_ptr<ClockBoard> board;
    int64_t own_host = 0;
    std::vector<int64_t> servers;       // the ranks that serve this worker, by host
    std::chrono::milliseconds limit{};  // ends one wait
  };
  // What the board waits for on this host ends, too, when a server is gone.
  explicit RemoteShares(Parts parts);
  ~RemoteShares();
  RemoteShares(const RemoteShares&) = delete;
  RemoteShares& operator=(const RemoteShares&) = delete;

  int64_t hosts() const { return static_cast<int64_t>(parts_.servers.size()); }
  int64_t own_host() const { return parts_.own_host; }
  // Returns all hosts but this one.
  std::vector<int64_t> others() const;

  using Tensors = std::vector<at::Tensor>;
  // Sends a request, whose ticket it sets; waits while there is no room. Throws DistBackendError
  // where that server is gone.
  void tell(int64_t host, const ShareRequest& request, Tensors tensors, const Errand& errand);
  RemoteAnswer ask(int64_t host, ShareRequest request, Tensors tensors, const Errand& errand);
  // Sends the same to all other hosts.
  void tell_all(const ShareRequest& request, const Errand& errand);

  // Says whether an answer is there. Throws DistBackendError where a server is gone.
  bool has_come(const AnswerOfHost& answer, const Errand& errand);
  // Waits for an answer. Throws DistBackendError with the words of the server, or where it is gone
  // or does not come; and what a signal handler raised.
  Tensors wait(const AnswerOfHost& answer, const Errand& errand);

  // Says good-bye to all servers, and waits until what was told has been taken. Never throws.
  void leave(LineState state, std::string_view word) noexcept;

 private:
  void take_answers();
  void check(const Errand& errand);
  [[noreturn]] void refuse_gone(int64_t host, const std::string& how, const Errand& errand);
  void wait_until(int64_t host, const Errand& errand, const std::function<bool()>& is_done);
  void sleep(uint32_t rung, const Errand& errand);
  std::string name_of(int64_t host) const;

  Parts parts_;
  int64_t tickets_ = 0;
  std::map<int64_t, std::weak_ptr<AnswerOfHost>> asked_;
  // These say by the rank of a server what has ended it, and since when it is known to be gone.
  std::map<int64_t, std::string> last_words_;
  std::map<int64_t, shm::Clock::time_point> gone_since_;
  shm::Clock::time_point looked_at_;
};

}  // namespace trireme::ps

#include <trireme/strategies/parameter_server/hosts/shard_client.h>

#include <trireme/common/duration.h>
#include <trireme/common/interruption.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <optional>
#include <utility>

namespace trireme::ps {
namespace {

// The time, after the deadline, for the answer of a server that at its own deadline names a late
// worker.
constexpr std::chrono::seconds kForItsAnswer{2};
constexpr std::chrono::milliseconds kForItsCause{500};
constexpr int kLooksForAnswer = 50;

}  // namespace

ShardClient::ShardClient(Parts parts) : parts_(std::move(parts)) {
  parts_.board->look_also([this](const WaitContext& context) { check(context); });
}

ShardClient::~ShardClient() { parts_.board->look_also({}); }

std::vector<int64_t> ShardClient::others() const {
  std::vector<int64_t> others;
  for (int64_t host = 0; host < hosts(); ++host)
    if (host != parts_.own_host) others.push_back(host);
  return others;
}

std::string ShardClient::name_of(int64_t host) const {
  return c10::str("server of rank ", parts_.servers[static_cast<size_t>(host)]);
}

void ShardClient::tell(int64_t host, const ShareRequest& request, Tensors tensors,
                       const WaitContext& context) {
  TensorMessage message;
  message.text = to_text(request);
  message.tensors = std::move(tensors);
  const int64_t server = parts_.servers[static_cast<size_t>(host)];
  const auto try_post = [&] {
    try {
      return parts_.box->try_post(server, message, context.text());
    } catch (const c10::DistBackendError&) {
      return false;  // that server is gone: check() says so
    }
  };
  bool is_posted = false;
  wait_until(host, context, [&] { return is_posted = is_posted || try_post(); });
}

RemoteAnswer ShardClient::ask(int64_t host, ShareRequest request, Tensors tensors,
                              const WaitContext& context) {
  auto answer = std::make_shared<AnswerOfHost>();
  answer->host = host;
  request.ticket = asked_.add(answer);
  tell(host, request, std::move(tensors), context);
  return answer;
}

void ShardClient::tell_all(const ShareRequest& request, const WaitContext& context) {
  for (const int64_t host : others()) tell(host, request, {}, context);
}

void ShardClient::take_answers() {
  for (MessageBox::Arrival& arrival : parts_.box->take_arrivals()) {
    ShareAnswer read = share_answer_of(arrival.message.text);
    if (read.ticket < 0) last_words_[arrival.from] = std::move(read.error);
    const RemoteAnswer answer = asked_.take(read.ticket);
    if (!answer) continue;
    answer->has_come = true;
    answer->error = std::move(read.error);
    answer->tensors = std::move(arrival.message.tensors);
  }
}

void ShardClient::refuse_gone(int64_t host, const std::string& how, const WaitContext& context) {
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, c10::str(context.text(), ": ", name_of(host), how), parts_.board->where(),
                 "Start the group again; what was saved can be loaded."));
}

// Throws if a server is gone, but a moment later: its last message may be on its way, and this host
// may be about to learn the cause, too, the loss of a worker say.
void ShardClient::check(const WaitContext& context) {
  looked_at_ = shm::Clock::now();
  check_interruption();
  take_answers();
  parts_.box->look();
  parts_.board->check_peers(context);
  for (const int64_t host : others()) {
    const int64_t server = parts_.servers[static_cast<size_t>(host)];
    const auto why = parts_.box->why_gone(server);
    if (!why && !parts_.box->has_ended(server)) continue;
    const auto noticed = gone_since_.try_emplace(server, shm::Clock::now()).first->second;
    if (shm::Clock::now() < noticed + kForItsCause) continue;
    const auto word = last_words_.find(server);
    refuse_gone(host,
                word != last_words_.end() ? " was ended by " + word->second
                : why                     ? " has gone: " + *why
                                          : " has closed",
                context);
  }
}

void ShardClient::wait_until(int64_t host, const WaitContext& context,
                             const std::function<bool()>& is_done) {
  if (shm::spin(kLooksForAnswer, is_done)) return;
  const auto waits = parts_.board->wait_times().count(context.cause);
  const auto deadline = deadline_after(parts_.limit + kForItsAnswer);
  shm::LookTimer looks(shm::Clock::now());
  const auto is_over = [&] {
    const auto now = shm::Clock::now();
    looks.call_if_due(now, [&] { check(context); });
    return context.has_deadline && now >= deadline;
  };
  const auto sleep = [&](uint32_t seen) { this->sleep(seen, context); };
  if (shm::FutexWait(parts_.box->futex()).until(is_done, is_over, sleep)) return;
  C10_THROW_ERROR(
      DistBackendError,
      error_text(kPsArea, c10::str(context.text(), ": ", name_of(host), " has not answered"),
                 parts_.board->where(),
                 "Look whether that rank is in serve(), or raise the timeout."));
}

void ShardClient::sleep(uint32_t seen, const WaitContext& context) {
  {
    std::optional<WorkerLock::Gap> gap;
    if (context.lets_others_in) gap.emplace(parts_.board->worker_lock());
    shm::sleep_on(parts_.box->futex(), seen);
  }
  parts_.board->worker_lock().check_not_ended(context.text, parts_.board->where());
}

bool ShardClient::has_come(const AnswerOfHost& answer, const WaitContext& context) {
  take_answers();
  if (!answer.has_come && shm::Clock::now() >= looked_at_ + shm::kLookEvery) check(context);
  return answer.has_come;
}

ShardClient::Tensors ShardClient::wait(const AnswerOfHost& answer, const WaitContext& context) {
  wait_until(answer.host, context, [&] {
    take_answers();
    return answer.has_come;
  });
  if (!answer.error.empty()) C10_THROW_ERROR(DistBackendError, answer.error);
  return answer.tensors;
}

void ShardClient::leave(LineState state, std::string_view word) noexcept {
  ShareRequest request;
  request.verb = ShareRequest::Verb::kLeave;
  request.state = state;
  request.word = word;
  const WaitContext context{[] { return std::string("leave"); }, "leave"};
  for (const int64_t host : others()) {
    const int64_t server = parts_.servers[static_cast<size_t>(host)];
    try {
      tell(host, request, {}, context);
      wait_until(host, context, [&] { return parts_.box->try_end(server); });
      wait_until(host, context, [&] { return parts_.box->is_drained(); });
    } catch (const std::exception&) {
      // The server is gone, or does not listen: then it finds out by itself that this worker has
      // gone.
    }
  }
}

}  // namespace trireme::ps

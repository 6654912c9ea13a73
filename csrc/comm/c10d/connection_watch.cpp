#include <trireme/comm/c10d/connection_watch.h>

#include <trireme/common/exception_text.h>

#include <exception>

namespace trireme {

std::string ConnectionWatch::why_broken(int64_t rank, Clock::duration patience) {
  const std::lock_guard lock(mutex_);
  Connection& connection = connections_[rank];
  if (connection.why_broken.empty()) {
    try {
      if (!connection.receive) connection.receive = post_(rank);
      if (!connection.receive) return {};
      connection.receive->abort();
      connection.receive->wait();
    } catch (const std::exception& error) {
      connection.why_broken = first_line_of(error);
      connection.broken_at = Clock::now();
    }
  }
  const bool is_due = Clock::now() - connection.broken_at >= patience;
  return is_due ? connection.why_broken : std::string();
}

void ConnectionWatch::forget() {
  const std::lock_guard lock(mutex_);
  connections_.clear();
}

bool is_through(c10d::Work& message) {
  try {
    return message.wait(std::chrono::milliseconds(1));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace trireme

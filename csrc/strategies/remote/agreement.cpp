#include <trireme/strategies/remote/agreement.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <random>
#include <sstream>

namespace trireme::remote {
namespace {

// The first lines say name, threads and session; the others are definitions.
std::string text_of(const StartRequest& request) {
  std::string name = request.name;
  // A name with a line break becomes one that cannot be printed, which is refused.
  std::replace(name.begin(), name.end(), '\n', '\r');
  const auto session = static_cast<int64_t>(std::random_device{}()) << 31 | std::random_device{}();
  std::string text =
      name + "\n" + std::to_string(request.threads) + "\n" + std::to_string(session) + "\n";
  for (const std::string& line : Definitions::of_process().texts()) text += line + "\n";
  return text;
}

// Returns what is wrong with a rank's name and threads; empty if nothing is.
std::string complaint_about(const std::string& name, int64_t threads, int64_t rank) {
  const std::string where = " (rank " + std::to_string(rank) + ")";
  if (name.empty()) return "got an empty name" + where;
  if (std::any_of(name.begin(), name.end(), [](unsigned char letter) { return letter < 0x20; }))
    return "got a name with control characters" + where;
  if (threads < 1)
    return "got threads=" + std::to_string(threads) + " at '" + name + "'" + where +
           ", expected at least 1";
  return {};
}

}  // namespace

Agreement agree_on_start(Communicator& communicator, const StartRequest& request) {
  const RankOf where = communicator.rank_of();
  Agreement agreed;
  std::map<std::string, int64_t> rank_of;
  std::string complaint;
  const auto note = [&](const std::string& text) {
    if (complaint.empty()) complaint = text;
  };
  int64_t rank = 0;
  for (const std::string& text :
       gather_texts(text_of(request), communicator, communicator.device())) {
    std::istringstream lines(text);
    std::string name;
    std::string threads;
    std::string session;
    std::getline(lines, name);
    std::getline(lines, threads);
    std::getline(lines, session);
    note(complaint_about(name, std::stoll(threads), rank));
    const auto [there, is_new] = rank_of.try_emplace(name, rank);
    if (!is_new)
      note("got the name '" + name + "' of ranks " + std::to_string(there->second) + " and " +
           std::to_string(rank));
    agreed.names.push_back(name);
    agreed.sessions.push_back(std::stoll(session));
    const std::string rest(std::istreambuf_iterator<char>(lines), {});
    agreed.definitions.push_back(read_definitions(rest));
    ++rank;
  }
  note(difference_of(agreed.definitions, agreed.names));
  TORCH_CHECK_VALUE(
      complaint.empty(),
      error_text("remote", complaint, where,
                 "Give each rank a name of its own, at least one thread, and the same "
                 "definitions."));
  return agreed;
}

}  // namespace trireme::remote

#include <trireme/comm/launch/rendezvous.h>

#include <trireme/common/duration.h>
#include <trireme/common/exception_text.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <exception>
#include <filesystem>
#include <string_view>

namespace trireme {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

constexpr milliseconds kDefaultTimeout = std::chrono::minutes(5);

struct Endpoint {
  std::string host;
  int64_t port = 0;
};

std::string text_of(const Endpoint& endpoint) {
  return endpoint.host + ":" + std::to_string(endpoint.port);
}

// The meeting place that init_method names: a file, an endpoint, or neither (env://).
struct MeetingPlace {
  std::string file;
  std::optional<Endpoint> endpoint;
};

[[noreturn]] void refuse_method(const std::string& method, const char* expected, RankOf where) {
  C10_THROW_ERROR(
      ValueError,
      error_text("launch", "init_method is '" + method + "', expected " + expected, where,
                 "Use tcp://host:port, file:///absolute/path, or env:// with MASTER_ADDR "
                 "and MASTER_PORT set."));
}

// Reads "host:port"; a host with colons of its own (IPv6) stands in brackets.
std::optional<Endpoint> parse_endpoint(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const std::string_view port = text.substr(colon + 1);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  const bool whole = error == std::errc() && end == port.data() + port.size();
  if (host.empty() || !whole || number < 1 || number > 65535) return std::nullopt;
  return Endpoint{std::string(host), number};
}

bool file_can_be_made(const std::filesystem::path& file) {
  std::error_code ignored;
  return file.is_absolute() && std::filesystem::is_directory(file.parent_path(), ignored) &&
         !std::filesystem::is_directory(file, ignored);
}

MeetingPlace parse_init_method(const std::string& method, RankOf where) {
  constexpr std::string_view kFile = "file://";
  constexpr std::string_view kTcp = "tcp://";
  MeetingPlace place;
  if (method.starts_with(kFile)) {
    place.file = method.substr(kFile.size());
    if (!file_can_be_made(place.file)) {
      refuse_method(method, "file:// and the absolute path of a file in a folder that exists",
                    where);
    }
  } else if (method.starts_with(kTcp)) {
    place.endpoint = parse_endpoint(std::string_view(method).substr(kTcp.size()));
    if (!place.endpoint) refuse_method(method, "tcp://host:port", where);
  } else if (!method.empty() && method != "env://") {
    refuse_method(method, "tcp://, file:// or env://", where);
  }
  return place;
}

Endpoint endpoint_of_environment(const LaunchEnvironment& environment) {
  const bool has_addr = !environment.master_addr.empty();
  const bool has_port = environment.master_port != 0;
  std::string missing = has_addr ? "MASTER_PORT is" : "MASTER_ADDR is";
  if (!has_addr && !has_port) missing = "MASTER_ADDR and MASTER_PORT are";
  TORCH_CHECK_VALUE(
      has_addr && has_port,
      error_text("launch", "the ranks have no place to meet: " + missing + " not set",
                 environment.rank_of(),
                 "Start the program with torchrun, set the variables, or pass an init_method."));
  return {environment.master_addr, environment.master_port};
}

[[noreturn]] void throw_unreachable(const std::string& place, RankOf where,
                                    const std::string& why) {
  C10_THROW_ERROR(
      DistBackendError,
      error_text(
          "launch", "the ranks did not find each other at " + place + ": " + why, where,
          "Check that all ranks run, with the same address, port and world size, that rank 0 is "
          "on that host, and that no firewall is between them."));
}

[[noreturn]] void throw_not_opened(const std::string& place, RankOf where,
                                   const std::exception& error) {
  const std::string why = first_line_of(error);
  if (why.find("EADDRINUSE") == std::string::npos) throw_unreachable(place, where, why);
  C10_THROW_ERROR(DistBackendError,
                  error_text("launch", place + " (MASTER_PORT) is in use by another program", where,
                             "Choose a free port, or wait until the other run has ended."));
}

struct OpenStore {
  StorePtr store;
  std::string place;  // for messages
  bool served_here = false;
};

OpenStore open_tcp_store(const Endpoint& endpoint, const LaunchEnvironment& environment,
                         milliseconds timeout) {
  // torchrun's promise is about its own address only.
  const bool agent_serves = environment.agent_serves_store &&
                            endpoint.host == environment.master_addr &&
                            endpoint.port == environment.master_port;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(endpoint.port);
  options.isServer = environment.rank == 0 && !agent_serves;
  options.multiTenant = true;   // a later init() of this process finds the server of an earlier one
  options.waitWorkers = false;  // wait_for_all does, for every kind of Store
  options.timeout = timeout;
  return {c10::make_intrusive<c10d::TCPStore>(endpoint.host, options), text_of(endpoint),
          options.isServer};
}

OpenStore open_store(const RendezvousRequest& request, milliseconds timeout) {
  const LaunchEnvironment& environment = request.environment;
  const RankOf where = environment.rank_of();
  const MeetingPlace place = parse_init_method(
      request.init_method.empty() ? environment.init_method : request.init_method, where);
  if (where.world == 1) return {c10::make_intrusive<c10d::HashStore>(), "", false};

  if (!place.file.empty()) {
    try {
      const auto world = static_cast<int>(where.world);
      return {c10::make_intrusive<c10d::FileStore>(place.file, world), place.file, false};
    } catch (const std::exception& error) {
      throw_not_opened(place.file, where, error);
    }
  }
  const Endpoint endpoint = place.endpoint ? *place.endpoint : endpoint_of_environment(environment);
  try {
    return open_tcp_store(endpoint, environment, timeout);
  } catch (const std::exception& error) {
    throw_not_opened(text_of(endpoint), where, error);
  }
}

// The n-th rendezvous of each rank in one Store is generation n: keys of earlier ones stay
// invisible. torchrun's Store outlives the ranks that it restarts, and those may have failed after
// different numbers of rendezvous, so each attempt counts anew.
std::string prefix_of_generation(c10d::Store& store, const LaunchEnvironment& environment) {
  const std::string attempt = "trireme/" + std::to_string(environment.attempt);
  const int64_t generation =
      store.add(attempt + "/generation_of_rank/" + std::to_string(environment.rank), 1);
  return attempt + "/" + std::to_string(generation);
}

// Returns how many ranks came, if the Store still answers; else its last error.
std::string who_came(c10d::Store& store, RankOf where, const std::exception& last) {
  try {
    return std::to_string(store.add("joined", 0)) + " of " + std::to_string(where.world) +
           " came within " + std::to_string(store.getTimeout().count()) + " ms";
  } catch (const std::exception&) {
    return first_line_of(last);
  }
}

void wait_for_all(c10d::Store& store, RankOf where, const std::string& place) {
  try {
    if (store.add("joined", 1) == where.world) store.set("all_joined", std::vector<uint8_t>{1});
    store.wait({"all_joined"});
  } catch (const std::exception& error) {
    throw_unreachable(place, where, who_came(store, where, error));
  }
}

}  // namespace

Rendezvous::Rendezvous(const RendezvousRequest& request) : where_(request.environment.rank_of()) {
  const milliseconds timeout = saturated(request.timeout.value_or(kDefaultTimeout));
  TORCH_CHECK_VALUE(
      timeout.count() > 0,
      error_text("launch",
                 "timeout is " + std::to_string(timeout.count()) + " ms, expected more than 0",
                 where_, "Pass a longer timeout."));
  OpenStore opened = open_store(request, timeout);
  serves_ = opened.served_here;
  opened.store->setTimeout(timeout);
  store_ = c10::make_intrusive<c10d::PrefixStore>(
      prefix_of_generation(*opened.store, request.environment), opened.store);
  wait_for_all(*store_, where_, opened.place);
}

Rendezvous::~Rendezvous() = default;

bool Rendezvous::leave(milliseconds patience) noexcept {
  if (left_ || where_.world == 1) return true;
  left_ = true;
  try {
    if (store_->add("left", 1) == where_.world) store_->set("all_left", std::vector<uint8_t>{1});
    if (serves_) store_->wait({"all_left"}, saturated(patience));
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace trireme

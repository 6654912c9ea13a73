#include <trireme/strategies/parameter_server/hosts/shard_messages.h>

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

namespace trireme::ps {
namespace {

using Json = nlohmann::ordered_json;

// Returns the JSON as text; texts of exceptions may hold bytes that are not UTF-8.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <typename F>
auto parse(const std::string& text, const F& f) {
  try {
    return f(Json::parse(text));
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, error_text(kPsArea,
                                        std::string("got a message between hosts of another "
                                                    "form: ") +
                                            error.what(),
                                        {}, "Use the same version of Trireme on all hosts."));
  }
}

}  // namespace

std::string to_text(const ShareRequest& request) {
  return dump(Json::array({static_cast<int64_t>(request.verb), request.table, request.ticket,
                           request.number, request.create, static_cast<uint32_t>(request.state),
                           request.word}));
}

std::string to_text(const ShareAnswer& answer) {
  return dump(Json::array({answer.ticket, answer.error}));
}

ShareRequest share_request_of(const std::string& text) {
  return parse(text, [](const Json& json) {
    ShareRequest request;
    request.verb = static_cast<ShareRequest::Verb>(json.at(0).get<int64_t>());
    request.table = json.at(1).get<int64_t>();
    request.ticket = json.at(2).get<int64_t>();
    request.number = json.at(3).get<double>();
    request.create = json.at(4).get<bool>();
    request.state = static_cast<LineState>(json.at(5).get<uint32_t>());
    request.word = json.at(6).get<std::string>();
    return request;
  });
}

ShareAnswer share_answer_of(const std::string& text) {
  return parse(text, [](const Json& json) {
    return ShareAnswer{json.at(0).get<int64_t>(), json.at(1).get<std::string>()};
  });
}

}  // namespace trireme::ps

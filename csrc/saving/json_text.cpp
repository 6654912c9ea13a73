#include <trireme/saving/json_text.h>

#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

// See [Note: JSON as text] in json_text.h.

namespace trireme {
namespace {

constexpr size_t kMaxShownKey = 60;  // bytes

bool is_digit(char one) { return one >= '0' && one <= '9'; }

// Bytes of the UTF-8 character at the front of `text`; 0 where none begins.
size_t utf8_bytes(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool is_short = first == 0xe0 && second < 0xa0;
    const bool is_surrogate = first == 0xed && second > 0x9f;
    return follows(1) && follows(2) && !is_short && !is_surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool is_short = first == 0xf0 && second < 0x90;
    const bool is_beyond = first == 0xf4 && second > 0x8f;
    return follows(1) && follows(2) && follows(3) && !is_short && !is_beyond ? 4 : 0;
  }
  return 0;
}

// Walks through a text once. Where it is in which containers is a stack of its own.
class JsonWalk {
 public:
  explicit JsonWalk(std::string_view text) : text_(text) {}

  std::vector<JsonMember> members() {
    skip_space();
    if (next() != '{') fail("no JSON object");
    begin_value();
    while (!open_.empty()) {
      skip_space();
      end_value();
    }
    if (at_ != text_.size()) fail("more after the end of the JSON object");
    return std::move(members_);
  }

 private:
  struct Open {
    char closing = '}';
    std::set<std::string> keys = {};
  };

  // A container goes onto the stack and its first value is begun; anything else is passed.
  void begin_value() {
    while (next() == '{' || next() == '[') {
      if (open_.size() == kMaxJsonDepth)
        fail("values nested deeper than " + std::to_string(kMaxJsonDepth));
      open_.push_back({next() == '{' ? '}' : ']'});
      ++at_;
      skip_space();
      if (next() == open_.back().closing) return;
      if (open_.back().closing == '}') pass_key();
    }
    if (next() == '"') {
      pass_string();
    } else if (next() == '-' || is_digit(next())) {
      pass_number();
    } else {
      pass_word();
    }
  }

  // Behind a value: what follows in its container.
  void end_value() {
    if (open_.size() == 1 && !members_.empty() && members_.back().value.data() == nullptr)
      members_.back().value = trimmed(text_.substr(value_, at_ - value_));
    if (next() == open_.back().closing) {
      open_.pop_back();
      ++at_;
      skip_space();
      return;
    }
    if (next() != ',') fail("no ',' or end behind a value");
    ++at_;
    skip_space();
    if (open_.back().closing == '}') pass_key();
    begin_value();
  }

  void pass_key() {
    if (next() != '"') fail("no key");
    const size_t begin = at_;
    pass_string();
    const std::string_view written = text_.substr(begin, at_ - begin);
    std::string key = written.find('\\') == std::string_view::npos
                          ? std::string(written.substr(1, written.size() - 2))
                          : nlohmann::json::parse(written).get<std::string>();
    if (!open_.back().keys.insert(key).second) fail("the key " + shown(key) + " twice");
    skip_space();
    if (next() != ':') fail("no ':' behind a key");
    ++at_;
    skip_space();
    if (open_.size() > 1) return;
    members_.push_back({std::move(key), {}});
    value_ = at_;
  }

  void pass_string() {
    ++at_;
    while (next() != '"') {
      if (at_ >= text_.size()) fail("a text without its end");
      if (next() == '\\') {
        pass_escape();
        continue;
      }
      if (static_cast<unsigned char>(next()) < 0x20) fail("a control character in a text");
      const size_t bytes = utf8_bytes(text_.substr(at_));
      if (bytes == 0) fail("bytes that are not UTF-8");
      at_ += bytes;
    }
    ++at_;
  }

  void pass_escape() {
    ++at_;
    if (next() != 'u') {
      if (next() == '\0' || std::string_view("\"\\/bfnrt").find(next()) == std::string_view::npos)
        fail("an unknown escape");
      ++at_;
      return;
    }
    const unsigned unit = pass_hex();
    if (unit < 0xd800 || unit > 0xdfff) return;
    const bool is_first = unit <= 0xdbff;
    if (is_first && text_.substr(at_, 2) == "\\u") {
      ++at_;
      const unsigned second = pass_hex();
      if (second >= 0xdc00 && second <= 0xdfff) return;
    }
    fail("half of a surrogate pair in a text");
  }

  // "u12ab", and what it says.
  unsigned pass_hex() {
    unsigned unit = 0;
    for (int i = 0; i < 4; ++i) {
      ++at_;
      const char digit = next();
      if (std::isxdigit(static_cast<unsigned char>(digit)) == 0) fail("an unknown escape");
      unit = unit * 16 +
             static_cast<unsigned>(is_digit(digit) ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }
    ++at_;
    return unit;
  }

  void pass_number() {
    if (next() == '-') ++at_;
    if (next() == '0') {
      ++at_;
    } else {
      pass_digits();
    }
    if (next() == '.') {
      ++at_;
      pass_digits();
    }
    if (next() == 'e' || next() == 'E') {
      ++at_;
      if (next() == '+' || next() == '-') ++at_;
      pass_digits();
    }
  }

  void pass_digits() {
    if (!is_digit(next())) fail("half of a number");
    while (is_digit(next())) ++at_;
  }

  void pass_word() {
    for (const std::string_view word : {"true", "false", "null"}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return;
    }
    fail("no JSON value");
  }

  void skip_space() {
    while (next() == ' ' || next() == '\n' || next() == '\t' || next() == '\r') ++at_;
  }

  // No JSON has this character outside of texts, so at the end nothing fits.
  char next() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  static std::string_view trimmed(std::string_view text) {
    return text.substr(0, text.find_last_not_of(" \n\t\r") + 1);
  }

  static std::string shown(const std::string& key) {
    return nlohmann::json(key.size() <= kMaxShownKey ? key : "...").dump(-1, ' ', true);
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw JsonTextError(what + ", at byte " + std::to_string(at_));
  }

  std::string_view text_;
  size_t at_ = 0;
  std::vector<Open> open_;
  std::vector<JsonMember> members_;  // of the outermost object
  size_t value_ = 0;                 // where the value of the last of them begins
};

std::string merge_members(const std::vector<std::string_view>& texts, size_t depth) {
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string_view>> values;
  for (const std::string_view text : texts) {
    for (JsonMember& one : json_members(text)) {
      std::vector<std::string_view>& known = values[one.key];
      if (known.empty()) order.push_back(one.key);
      const bool adds = known.empty() || (known.front().front() == '{' &&
                                          one.value.front() == '{' && known.front() != one.value);
      if (adds) known.push_back(one.value);
    }
  }
  if (order.empty()) return "{}";
  std::string merged = "{";
  for (const std::string& key : order) {
    const std::vector<std::string_view>& known = values.at(key);
    merged += merged.size() > 1 ? ",\n" : "\n";
    merged += std::string(2 * depth, ' ') + nlohmann::json(key).dump() + ": ";
    merged += known.size() > 1 ? merge_members(known, depth + 1) : std::string(known.front());
  }
  return merged + "\n" + std::string(2 * (depth - 1), ' ') + "}";
}

}  // namespace

std::vector<JsonMember> json_members(std::string_view text) { return JsonWalk(text).members(); }

void check_json(std::string_view text) { json_members(text); }

std::string merge_json(const std::vector<std::string_view>& texts) {
  return merge_members(texts, 1);
}

}  // namespace trireme

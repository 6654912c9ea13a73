#include <trireme/saving/json_text.h>

#include <nlohmann/json.hpp>
#include <set>

// See [Note: JSON as text] in json_text.h.

namespace trireme {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr size_t kMaxShownKey = 60;       // bytes
constexpr size_t kMostLongNumbers = 100;  // that no double holds
constexpr int kNumberOverflow = 406;      // nlohmann's error number for such a number

std::string shown(const std::string& key) {
  return OrderedJson(key.size() <= kMaxShownKey ? key : "...").dump(-1, ' ', true);
}

// Returns an error message of nlohmann's parser in ASCII, without its leading exception id and the
// last characters read.
std::string plain_words(const std::string& message) {
  const size_t begin = message.find("] ");
  std::string words = message.substr(begin == std::string::npos ? 0 : begin + 2);
  words = words.substr(0, words.find("; last read"));
  for (char& letter : words)
    if (letter < ' ' || letter > '~') letter = '?';
  return words;
}

// Receives the events of nlohmann's SAX parser, which neither recurses nor makes a tree.
class JsonCheck final : public nlohmann::json_sax<OrderedJson> {
 public:
  bool null() override { return is_value(); }
  bool boolean(bool /*value*/) override { return is_value(); }
  bool number_integer(int64_t /*value*/) override { return is_value(); }
  bool number_unsigned(uint64_t /*value*/) override { return is_value(); }
  bool number_float(double /*value*/, const std::string& written) override {
    if (written.find_first_of(".eE") == std::string::npos) has_long_integer_ = true;
    return is_value();
  }
  bool string(std::string& /*value*/) override { return is_value(); }
  bool binary(nlohmann::json::binary_t& /*value*/) override { return is_value(); }
  bool start_object(size_t /*count*/) override { return open(); }
  bool key(std::string& name) override {
    return keys_.back().insert(name).second ||
           fail("an object that has the key " + shown(name) + " twice");
  }
  bool end_object() override { return close(); }
  bool start_array(size_t /*count*/) override { return is_value() && open(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::detail::exception& error) override {
    if (error.id == kNumberOverflow) {
      long_number_ends_ = position;
      long_number_bytes_ = token.size();
    }
    return fail("a text that is no JSON: " + plain_words(error.what()));
  }

  const std::string& problem() const { return problem_; }
  bool has_long_integer() const { return has_long_integer_; }
  // Returns the end of a number that no double holds, which has stopped the parser; 0: none.
  size_t long_number_ends() const { return long_number_ends_; }
  size_t long_number_bytes() const { return long_number_bytes_; }

 private:
  bool is_value() { return !keys_.empty() || fail("no JSON object"); }
  bool open() {
    if (keys_.size() == kMaxJsonDepth)
      return fail("values nested deeper than " + std::to_string(kMaxJsonDepth));
    keys_.emplace_back();
    return true;
  }
  bool close() {
    keys_.pop_back();
    return true;
  }
  bool fail(const std::string& problem) {
    if (problem_.empty()) problem_ = problem;
    return false;
  }

  std::vector<std::set<std::string>> keys_;  // keys of each enclosing container
  std::string problem_;
  bool has_long_integer_ = false;
  size_t long_number_ends_ = 0;
  size_t long_number_bytes_ = 0;
};

// Checks a text, and returns whether it has integers of more than 64 bits.
bool look_through(std::string_view given) {
  std::string text(given);
  bool has_long_integer = false;
  for (size_t i = 0; i <= kMostLongNumbers; ++i) {
    JsonCheck check;
    if (OrderedJson::sax_parse(text, &check)) return has_long_integer || check.has_long_integer();
    if (check.long_number_ends() == 0) throw JsonTextError(check.problem());
    // The parser makes doubles of long numbers, and stops if it cannot: go on with 0 instead.
    has_long_integer = true;
    text.replace(check.long_number_ends() - check.long_number_bytes(), check.long_number_bytes(),
                 "0");
  }
  throw JsonTextError("more than " + std::to_string(kMostLongNumbers) +
                      " numbers that no double holds");
}

// Merges objects. nlohmann's update() throws if one of two values is no object.
void add_members(OrderedJson& merged, const OrderedJson& more) {
  for (const auto& [key, value] : more.items()) {
    const auto known = merged.find(key);
    if (known == merged.end()) {
      merged[key] = value;
    } else if (known->is_object() && value.is_object()) {
      add_members(*known, value);
    }
  }
}

}  // namespace

void check_json(std::string_view text) { look_through(text); }

std::string merge_json(const std::vector<std::string>& texts) {
  OrderedJson merged = OrderedJson::object();
  for (const std::string& text : texts) {
    if (look_through(text)) throw JsonTextError("an integer of more than 64 bits");
    add_members(merged, OrderedJson::parse(text));
  }
  return merged.dump(2);
}

}  // namespace trireme

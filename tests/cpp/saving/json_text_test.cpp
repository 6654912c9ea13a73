// JSON that is passed on as text.

#include <trireme/saving/json_text.h>

#include <catch_torch.h>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace trireme::json_text_test {

using namespace std::string_literals;

namespace {

std::string problem_of(const std::string& text) {
  try {
    check_json(text);
    return "";
  } catch (const JsonTextError& error) {
    return error.what();
  }
}

std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

}  // namespace

TEST_CASE("members of a JSON object are the text that stands there") {
  const std::string text =
      " {\"a\" : 1e5 ,\"b\\u0041\\ud83d\\ude00\":[1, {\"c\": [] }]\n,\"\": \"}\\\"\"} \n";
  std::string picture;
  for (const JsonMember& one : json_members(text))
    picture += "<" + one.key + ">" + std::string(one.value) + "|";
  CHECK(picture == "<a>1e5|<bA\U0001f600>[1, {\"c\": [] }]|<>\"}\\\"\"|");
  CHECK(json_members("{}").empty());
}

TEST_CASE("texts that are JSON, and some that are not, as a parser has them") {
  for (const char* value : {"0",
                            "-0",
                            "12",
                            "-1.5",
                            "1E+5",
                            "0.1e-7",
                            "true",
                            "false",
                            "null",
                            "[]",
                            "[ ]",
                            "{ }",
                            "[1,[2,[]],{}]",
                            R"("\"\\\/\b\f\n\r\t\u00e9")",
                            "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"",
                            "01",
                            "-",
                            "1.",
                            ".5",
                            "1e",
                            "+1",
                            "tru",
                            "nul",
                            "NaN",
                            "[1,]",
                            "[,1]",
                            "[1 2]",
                            "{1:2}",
                            "{\"a\"}",
                            "{\"a\":}",
                            "{\"a\":1,}",
                            "]",
                            "\"",
                            "\"\\x\"",
                            "\"\\u12g4\"",
                            "\"\\u123\"",
                            "\"a\nb\"",
                            "\"\xc0\x80\"",
                            "\"\xed\xa0\x80\"",
                            "\"\xf4\x90\x80\x80\"",
                            "\"\xe2\x82\"",
                            "\"\xff\"",
                            R"("\ud800")",
                            R"("\ud800\u0041")",
                            R"("\udc00")",
                            R"("\ud800x")",
                            "'a'",
                            "1 1",
                            "1/",
                            ""}) {
    const std::string text = std::string("{\"v\": ") + value + "}";
    INFO(text);
    CHECK(problem_of(text).empty() == nlohmann::json::accept(text));
  }
  CHECK(problem_of("{}{}").find("more after the end") == 0);
  CHECK(problem_of("{} \0x"s).find("more after the end") == 0);
  for (const char* text : {"", " ", "1", "[]", "\"a\"", "{", "{\"a\"", "\xef\xbb\xbf{}"})
    CHECK_FALSE(problem_of(text).empty());
}

TEST_CASE("what a parser takes and a checkpoint does not") {
  CHECK(problem_of(R"({"a": {"b": 1, "\u0062": 2}})") == R"(the key "b" twice, at byte 23)");
  CHECK(problem_of("{\"\xc3\xa9\": 1, \"\xc3\xa9\": 1}") ==
        R"(the key "\u00e9" twice, at byte 14)");
  CHECK(problem_of(R"({"a": {"b": 1}, "b": [{"b": 1}, {"b": 2}]})").empty());
  const auto nested = [](size_t levels) {
    return "{\"a\":" + repeated("[", levels - 1) + repeated("]", levels - 1) + "}";
  };
  CHECK(problem_of(nested(kMaxJsonDepth)).empty());
  CHECK(problem_of(nested(kMaxJsonDepth + 1)) == "values nested deeper than 500, at byte 504");
  CHECK(problem_of(nested(1'000'000)) == "values nested deeper than 500, at byte 504");
  CHECK(problem_of("{\"a\":" + repeated("9", 100'000) + "}").empty());
}

TEST_CASE("objects are merged key by key, values stay as they are written") {
  const std::string big = repeated("7", 400);
  const std::string first = R"({"groups": [1, 2.50], "state": {"a": {"n": )" + big + "}}}";
  const std::string second =
      R"({"state": {"b": 1e3, "a": {"n": 0, "m": []}}, "groups": {}, "more": {}})";
  const std::string expected =
      "{\n  \"groups\": [1, 2.50],\n  \"state\": {\n    \"a\": {\n" + ("      \"n\": " + big) +
      ",\n      \"m\": []\n    },\n    \"b\": 1e3\n  },\n  \"more\": {}\n}";
  CHECK(merge_json({first, second, first}) == expected);
  CHECK(merge_json({expected, first, second}) == expected);
  CHECK(merge_json({"{}", "{ }"}) == "{}");
  CHECK(merge_json({R"({"\u0061\"": 1})", R"({"a\"": 2})"}) == "{\n  \"a\\\"\": 1\n}");
}

}  // namespace trireme::json_text_test

// JSON that is passed on as text.

#include <trireme/saving/json_text.h>

#include <algorithm>
#include <catch_torch.h>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace trireme::json_text_test {

namespace {

std::string problem_in(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const JsonTextError& error) {
    return error.what();
  }
}

std::string problem_of(const std::string& text) {
  return problem_in([&] { check_json(text); });
}

std::string repeated(const std::string& text, size_t count) {
  std::string all;
  for (size_t i = 0; i < count; ++i) all += text;
  return all;
}

}  // namespace

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
  for (const char* text : {"", " ", "{", "{\"a\"", "{}{}"})
    CHECK(problem_of(text).find("a text that is no JSON: ") == 0);
  for (const char* text : {"1", "[]", "\"a\""}) CHECK(problem_of(text) == "no JSON object");
}

TEST_CASE("what a parser takes and a checkpoint does not") {
  CHECK(problem_of(R"({"a": {"b": 1, "\u0062": 2}})") == R"(an object that has the key "b" twice)");
  CHECK(problem_of("{\"\xc3\xa9\": 1, \"\xc3\xa9\": 1}") ==
        R"(an object that has the key "\u00e9" twice)");
  CHECK(problem_of(R"({"a": {"b": 1}, "b": [{"b": 1}, {"b": 2}]})").empty());
  const auto nested = [](size_t levels) {
    return "{\"a\":" + repeated("[", levels - 1) + repeated("]", levels - 1) + "}";
  };
  CHECK(problem_of(nested(kMaxJsonDepth)).empty());
  CHECK(problem_of(nested(kMaxJsonDepth + 1)) == "values nested deeper than 500");
  CHECK(problem_of(nested(1'000'000)) == "values nested deeper than 500");
}

TEST_CASE("what is said of a text is ASCII") {
  const std::string said = problem_of("{\"a\": \"\xff\xfe\"}");
  CHECK(said.find("ill-formed UTF-8 byte") != std::string::npos);
  CHECK(std::all_of(said.begin(), said.end(),
                    [](char letter) { return letter >= ' ' && letter <= '~'; }));
}

TEST_CASE("numbers that no double holds") {
  const std::string big = repeated("9", 100'000);
  CHECK(problem_of("{\"a\": " + big + ", \"b\": [-" + big + ", 1e999]}").empty());
  CHECK(problem_of("{\"a\": " + big + ", \"a\": 1}") == R"(an object that has the key "a" twice)");
  CHECK(problem_of("{\"a\": " + big + ", \"b\": x}").find("a text that is no JSON: ") == 0);
  std::string many = "0";
  for (int i = 0; i < 101; ++i) many += ",1e999";
  CHECK(problem_of("{\"a\": [" + many + "]}") == "more than 100 numbers that no double holds");
}

TEST_CASE("objects are merged key by key, and the first value stays") {
  const std::string first = R"({"groups": [1, 2.50], "state": {"a": {"n": 18446744073709551615}}})";
  const std::string second =
      R"({"state": {"b": 0.1, "a": {"n": 0, "m": []}}, "groups": {}, "more": {}})";
  const auto expected = nlohmann::json::parse(
      R"({"groups": [1, 2.5], "state": {"a": {"n": 18446744073709551615, "m": []}, "b": 0.1},
          "more": {}})");
  CHECK(nlohmann::json::parse(merge_json({first, second, first})) == expected);
  CHECK(merge_json({"{}", "{ }"}) == "{}");
  CHECK(problem_in([] { merge_json({R"({"a": 18446744073709551616})"}); }) ==
        "an integer of more than 64 bits");
}

}  // namespace trireme::json_text_test

#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace trireme::test {

// What is wrong on any of the threads that are ranks.
class Wrong {
 public:
  void add(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    found_.push_back(what);
  }
  void unless(bool is_right, const std::string& what) {
    if (!is_right) add(what);
  }
  void unless_says(const std::string& text, const std::string& expected) {
    unless(text.find(expected) != std::string::npos, "expected " + expected + ", got " + text);
  }
  const std::vector<std::string>& found() const { return found_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> found_;
};

// Returns the text of what `work` throws; an empty one if it throws nothing.
inline std::string text_of_error(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace trireme::test

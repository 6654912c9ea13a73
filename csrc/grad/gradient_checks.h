#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/common/language.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

namespace trireme {

// Checks of the order of calls, and of gradients that a backward cannot average: throw, or warn. An
// exception thrown while a gradient comes leaves the user's backward().
class TRIREME_API GradientChecks {
 public:
  // `area` names the strategy in messages.
  GradientChecks(std::string area, RankOf where) : area_(std::move(area)), where_(where) {}

  // Throws c10::Error with that text, "got ..., expected ...", unless `is_fine`.
  void expect(bool is_fine, const char* text, const Advice& advice) const;
  void expect(bool is_fine, const char* text, const char* advice) const {
    expect(is_fine, text, Advice{advice, advice});
  }
  // Throws c10::DistBackendError: the group failed in an earlier step. Gradients of a strategy that
  // has no forward of its own (ZeRO) begin with a backward.
  [[noreturn]] void refuse_after(const std::string& failure, bool begins_with_backward) const;

  // Throws c10::NotImplementedError for a gradient that was taken out of .grad. A parameter that
  // came after wrapping has no name.
  void check(const at::Tensor& parameter, const std::string& name);
  // Warns once, on rank 0, if a gradient has a graph; see [Note: gradients with a graph].
  void check_graph(const at::Tensor& parameter, bool is_kept) const;
  // Throws c10::NotImplementedError: the gradient that came is on its way already.
  [[noreturn]] void refuse_late(const std::string& name);

  // Returns the message to other ranks about a backward that an exception has left: after the
  // gradient of parameter `last`, empty before any. The cause is the last exception thrown here in
  // this step, else the text `why`, if there is one.
  std::string text_of_abandoned(int64_t step, const std::string& last,
                                const std::string& why) const;
  void begin_step() { refused_.clear(); }

 private:
  [[noreturn]] void refuse(const std::string& name, const char* got, const char* next_step);

  std::string area_;
  RankOf where_;
  std::string refused_;  // the last exception text of this step
};

}  // namespace trireme

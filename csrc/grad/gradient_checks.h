#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

namespace trireme {

// Refuses gradients that a backward cannot average, or says what comes of them. What is raised
// while a gradient comes leaves the user's backward().
class TRIREME_API GradientChecks {
 public:
  // `area` names the strategy in messages.
  GradientChecks(std::string area, RankOf where) : area_(std::move(area)), where_(where) {}

  // Throws c10::NotImplementedError for a gradient that somebody took out of .grad. A parameter
  // that came after wrapping has no name. Warns once, on rank 0, of a gradient with a graph; see
  // [Note: gradients with a graph].
  void check(const at::Tensor& parameter, const std::string& name, bool keeps_graphs);
  // Throws c10::NotImplementedError: the gradient that came is on its way already.
  [[noreturn]] void refuse_late(const std::string& name);

  // Returns what was thrown last in this step, so that other ranks can be told; empty if nothing.
  const std::string& refused() const { return refused_; }
  void begin_step() { refused_.clear(); }

 private:
  void say_of_graph(bool is_kept) const;
  [[noreturn]] void refuse(const std::string& name, const char* got, const char* next_step);

  std::string area_;
  RankOf where_;
  std::string refused_;
};

}  // namespace trireme

#pragma once

#include <trireme/grad/average.h>
#include <trireme/grad/codes/gradient_coder.h>
#include <trireme/grad/codes/kept_codes.h>
#include <trireme/module/module_parameters.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace trireme {

// Averages of gradients over a group that sends codes of them. One thread at a time.
//
// Cost: an all-reduce of two numbers per tensor, which is waited for, and codes, which are not.
// Memory: the gradients in fp32, until finish().
class TRIREME_API CodedAverage final : public ListAverage {
 public:
  CodedAverage(const std::shared_ptr<Communicator>& group, const Compression& compression)
      : group_(group), coder_(group, compression) {}

  // Sets the parameters whose gradients are averaged, the same ones on all ranks.
  void set_parameters(const NamedParameters& parameters);
  // Begins a step: what has been begun before is forgotten. Collective the first time. It ends, or
  // is abandoned.
  void begin_step();
  void end_step() { coder_.end_step(); }

  // Throws ValueError for gradients that are sparse on any rank, on all of them alike.
  void begin(const std::vector<at::Tensor>& like, const std::vector<at::Tensor>& values,
             const Labels& labels) override;
  void finish(const Place& place) override;
  // What codes have left out of a step that failed is as it was before, where the group works on.
  void abandon() override;

  const SentCodes& sent() const { return coder_.sent(); }
  KeptCodes kept_codes();
  void announce_failure(const std::string& text) const noexcept { coder_.announce_failure(text); }

 private:
  // Gradients of one kind, one behind the other.
  struct Flight {
    std::vector<at::Tensor> like = {};
    std::vector<at::Tensor> values = {};
    at::Tensor memory = {};
    std::string label = {};
    Pending pending = {};
  };
  void launch(Flight flight);
  size_t number_of(const at::Tensor& parameter) const;

  std::shared_ptr<Communicator> group_;
  GradientCoder coder_;
  std::vector<ParameterInfo> infos_;
  std::vector<at::Tensor> parameters_;
  std::unordered_map<const at::TensorImpl*, size_t> numbers_;
  std::vector<Flight> in_flight_;
};

}  // namespace trireme

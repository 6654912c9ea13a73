#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/common/export.h>
#include <trireme/grad/codes/gradient_coder.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// One tensor of a worker that is to be averaged.
struct AveragedPart {
  std::string name;
  int64_t number = 0;  // its place among all parameters, the same on all workers
  at::Tensor anchor;   // of the sizes of `value`; what codes leave out belongs to it
  at::Tensor value;
};

// What averages: the values, or how much they differ from their anchors.
enum class AverageOf : uint8_t { kValues, kDifferences };

// Weighted means of tensors over workers, in flight until finish(); one at a time. Values are
// summed up in fp32, those of fp64 in fp64, in one all-reduce each; where there is compression, in
// fp32 as codes. One thread at a time.
class TRIREME_API WorkerAverage {
 public:
  // Each rank of `workers` sends for itself.
  WorkerAverage(std::shared_ptr<Communicator> workers,
                const std::optional<Compression>& compression);

  struct Request {
    std::vector<AveragedPart> parts;
    AverageOf of = AverageOf::kValues;
    double weight = 1;  // of this worker; with 0 its values do not count, whatever they are
    std::string label;
  };
  // Starts. Collective. The values may be written as soon as it returns.
  void start(const Request& request);
  bool is_in_flight() const { return is_in_flight_; }
  // Waits, and returns the means in their order, of the sizes of the values and in fp32 or fp64;
  // absent if all weights are 0: then codes have left nothing out.
  std::optional<std::vector<at::Tensor>> finish();
  // Forgets what is in flight.
  void abandon();

  // Returns what codes values; null without compression, or if there is one worker.
  GradientCoder* coder() const { return coder_.get(); }
  Communicator& workers() const { return *workers_; }

 private:
  struct Place {
    at::Tensor flat;
    int64_t begin = 0;
    int64_t numel = 0;  // real numbers
    std::vector<int64_t> sizes = {};
    bool is_complex = false;
    at::Tensor anchor = {};
  };
  bool goes_as_fp64(const at::Tensor& value) const;
  void lay_out(const Request& request);
  void fill(const Request& request) const;
  void start_codes(const Request& request);
  double total_weight() const;
  static at::Tensor shaped(const Place& place);

  std::shared_ptr<Communicator> workers_;
  std::unique_ptr<GradientCoder> coder_;
  // in flight
  bool is_in_flight_ = false;
  std::vector<Place> places_;
  at::Tensor singles_;  // fp32; behind the values the weight
  at::Tensor doubles_;  // fp64
  at::Tensor weight_;   // beside codes
  std::vector<Pending> verbs_;
};

}  // namespace trireme

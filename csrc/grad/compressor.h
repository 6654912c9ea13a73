#pragma once

// Gradient path 3/5. In: bucket.h  Out: grad_reducer.h

#include <trireme/comm/communicator.h>
#include <trireme/grad/bucket.h>

#include <memory>
#include <string>
#include <vector>

namespace trireme {

class CommHook;

// A full bucket on its way out.
struct CompressorRequest {
  Bucket& bucket;
  const std::vector<at::Tensor>& parameters;  // all of the module; the bucket's plan indexes them
  size_t index = 0;
  size_t bucket_count = 0;
  const std::string& label;
};

// How one bucket gets from "this rank's gradients" to "the average over all ranks". The identity
// sends it as it is; what a user brings (a communication hook) or later issues add (error feedback,
// quantisation) stands here, and nothing before or after this stage knows the difference.
class TRIREME_API Compressor {
 public:
  virtual ~Compressor() = default;

  // Says whether the reducer divides by the number of ranks while it fills the bucket, and whether
  // the tail of the bucket (the used-map) may travel with it.
  virtual bool is_plain_sum() const = 0;

  // Starts the reduction.
  virtual Pending reduce(const CompressorRequest& request) = 0;
};

// One all-reduce (sum) of the bucket's wire tensor, in place.
TRIREME_API std::unique_ptr<Compressor> make_identity_compressor(
    std::shared_ptr<Communicator> communicator);

// One reduce_scatter (sum) of a bucket with OwnShards::scatters into its sums().
TRIREME_API std::unique_ptr<Compressor> make_scatter_compressor(
    std::shared_ptr<Communicator> communicator);

// Hands each bucket to a communication hook, which also divides.
TRIREME_API std::unique_ptr<Compressor> make_hook_compressor(std::shared_ptr<CommHook> hook);

}  // namespace trireme

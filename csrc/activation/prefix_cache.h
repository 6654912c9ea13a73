#pragma once

#include <trireme/activation/activation_cache.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trireme {

// A parameter or buffer of a layer.
struct PrefixTensor {
  size_t layer = 0;
  std::string name = {};
  at::Tensor tensor = {};
  bool is_parameter = true;
};

// Layers whose outputs are kept by an ActivationCache: the use of a cache, for both languages.
// Never returns a stale or a wrong value; see [Note: outputs of frozen layers, kept in the memory
// of a host]. One thread at a time runs its layers; others wait.
class TRIREME_API PrefixCache {
 public:
  // Runs the layers from `first` on.
  using Run = std::function<at::Tensor(size_t first, const at::Tensor& input)>;

  // `layers` says of each what it is, beside its tensors, such as its class and its options.
  // `always`: whether rows are stored whatever it costs to read them; otherwise from the eighth
  // call on only while a timed read costs less than the timed layers.
  PrefixCache(std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers, bool always);

  // Returns the outputs for a batch, without a graph: copies of the rows that are there, for others
  // what `run` returns, which is stored. `tensors` are those that the layers have now, in their
  // order; their versions are looked at, and their values are hashed where these have changed.
  // Throws ValueError for ids that are no whole numbers, one per row, from 0 to samples - 1; for a
  // parameter that is trained; for layers that draw random numbers, or change their buffers; for
  // rows of another size than before.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& ids,
                     const std::vector<PrefixTensor>& tensors, const Run& run);

 private:
  struct Seen {
    const at::TensorImpl* tensor;
    uint32_t version;
    const void* data;
    bool operator==(const Seen&) const = default;
  };
  struct Rate {  // what a row costs
    double seconds = 0;
    int64_t rows = 0;
    double each() const { return rows > 0 ? seconds / static_cast<double>(rows) : 0; }
  };

  std::vector<Seen> look(const std::vector<PrefixTensor>& tensors) const;
  void hash_layers(const std::vector<PrefixTensor>& tensors);
  std::vector<uint64_t> keys(const at::Tensor& input) const;
  std::vector<int64_t> check(const at::Tensor& input, const at::Tensor& ids) const;
  std::vector<CacheRow> rows_of(const at::Tensor& input, const std::vector<int64_t>& ids);
  at::Tensor run_layers(size_t first, const at::Tensor& input,
                        const std::vector<PrefixTensor>& tensors, const Run& run);
  bool stores() const;
  void store(const std::vector<CacheRow>& rows, const std::vector<uint64_t>& keys,
             const at::Tensor& outputs);
  void expect_form(const at::Tensor& outputs) const;
  void turn_off(int64_t id);
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::shared_ptr<ActivationCache> cache_;
  std::vector<std::string> layers_;
  bool always_;
  std::mutex mutex_;
  std::vector<Seen> seen_;
  std::vector<uint64_t> hashes_;  // of the first, the first two, ... layers
  int64_t calls_ = 0;
  Rate hashing_, reading_, running_;
};

}  // namespace trireme

#pragma once

#include <trireme/activation/activation_cache.h>
#include <trireme/activation/seen_tensors.h>
#include <trireme/common/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
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
};

// The layers of a prefix, in one language or the other.
class TRIREME_API PrefixLayers {
 public:
  // Called with a parameter or a buffer.
  using See = c10::function_ref<void(const at::Tensor& tensor, bool is_parameter)>;

  virtual ~PrefixLayers() = default;
  // Calls `see` for each tensor that they have now, in an order that changes only with the tensors.
  // Throws ValueError for layers that depend on the training mode that they are in. Called in each
  // use, so that it must cost little.
  virtual void look(See see) const = 0;
  // Returns the tensors by name, those of one layer together.
  virtual std::vector<PrefixTensor> tensors() const = 0;
  // Runs the layers from `first` on.
  virtual at::Tensor run(size_t first, const at::Tensor& input) = 0;

 protected:
  PrefixLayers() = default;
  PrefixLayers(const PrefixLayers&) = default;
  PrefixLayers& operator=(const PrefixLayers&) = default;
};

// Layers whose outputs are kept by an ActivationCache: the use of a cache, for both languages.
// Never returns a stale or a wrong value; see [Note: outputs of frozen layers, kept in the memory
// of a host]. One thread at a time runs its layers; others wait.
class TRIREME_API PrefixCache {
 public:
  // `layers` says of each what it is, beside its tensors, such as its class and its options.
  // `always`: whether rows are stored whatever it costs to read them; otherwise from the eighth
  // call on only while a timed read costs less than the timed layers.
  PrefixCache(std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers, bool always);

  // Returns the outputs for a batch, without a graph: copies of the rows that are there, for others
  // what the layers return, which is stored. Where tensors of the layers are others than in the
  // call before, or were written, all values are hashed. Throws ValueError for ids that are no
  // whole numbers, one per row, from 0 to samples - 1; for a parameter that is trained; for layers
  // that draw random numbers, or change their buffers; for rows of another size than before. Where
  // all rows are there it costs a pass over the input and a copy of the outputs, on the threads of
  // torch's intra-op pool. Where another thread draws random numbers while the layers run, they run
  // once more, which shows that it was not them.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& ids, PrefixLayers& layers);

 private:
  // The seconds that a row has cost in the fastest call: whatever else the machine does only adds
  // to them.
  class RowCost {
   public:
    void note(double seconds, size_t rows);
    bool is_known() const { return is_known_; }
    double seconds() const { return seconds_; }

   private:
    bool is_known_ = false;
    double seconds_ = 0;
  };

  struct Batch {
    const at::Tensor& input;
    const std::vector<CacheRow>& rows;
    const std::vector<uint64_t>& keys;
    const std::vector<int64_t>& depths;  // layers that each row has gone through
  };

  bool are_as_seen(const PrefixLayers& layers) const;
  void see(const PrefixLayers& layers);
  void hash_layers(const std::vector<PrefixTensor>& tensors);
  std::vector<uint64_t> keys(const at::Tensor& input) const;
  std::vector<int64_t> check(const at::Tensor& input, const at::Tensor& ids) const;
  std::vector<CacheRow> rows_of(const at::Tensor& input, const std::vector<int64_t>& ids);
  std::vector<int64_t> read(const std::vector<CacheRow>& rows, const std::vector<uint64_t>& keys,
                            const at::Tensor& into);
  bool complete(const at::Tensor& found, const Batch& batch, PrefixLayers& layers);
  at::Tensor run_layers(size_t first, const at::Tensor& input, PrefixLayers& layers);
  at::Tensor run_once(size_t first, const at::Tensor& input, PrefixLayers& layers);
  bool stores() const;
  void store(const std::vector<CacheRow>& rows, const std::vector<uint64_t>& keys,
             const at::Tensor& outputs);
  void expect_form(const at::Tensor& outputs) const;
  void expect_unchanged(const PrefixLayers& layers) const;
  void turn_off(int64_t id);
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::shared_ptr<ActivationCache> cache_;
  std::vector<std::string> layers_;
  bool always_;
  std::mutex mutex_;
  SeenTensors seen_;
  std::vector<uint64_t> hashes_;  // of the first, the first two, ... layers
  int64_t calls_ = 0;
  RowCost hashing_, reading_, running_;
};

}  // namespace trireme

#include <trireme/activation/prefix_cache.h>

#include <trireme/common/error.h>
#include <trireme/common/resolved.h>
#include <trireme/kernels/cpu/parallel.h>
#include <trireme/memory/value_hash.h>
#include <trireme/module/replica_random.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kCallsBeforeAsking = 7;
constexpr int kTrialReads = 3;
constexpr size_t kBytesPerThread = size_t{128} << 10U;

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

uint64_t text_hash(const std::string& text) { return hash_of_bytes(text.data(), text.size()); }

uint64_t joined(const std::vector<uint64_t>& hashes) {
  return hash_of_bytes(hashes.data(), hashes.size() * sizeof(uint64_t));
}

std::vector<at::Tensor> states_of(std::vector<at::Generator>& generators) {
  std::vector<at::Tensor> states;
  for (at::Generator& generator : generators) {
    const std::lock_guard lock(generator.mutex());
    states.push_back(generator.get_state());
  }
  return states;
}

bool are_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return true;
}

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

std::string name_in(const std::vector<PrefixTensor>& tensors, const at::Tensor& tensor) {
  for (const PrefixTensor& one : tensors)
    if (one.tensor.is_same(tensor)) return one.name;
  return "layers";
}

// Calls body(i) for each row, on several threads where rows are large.
void for_rows(size_t rows, size_t row_bytes, c10::function_ref<void(size_t row)> body) {
  const size_t grain = std::max(kBytesPerThread / std::max(row_bytes, size_t{1}), size_t{1});
  const auto range = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(static_cast<size_t>(i));
  };
  cpu::for_ranges(static_cast<int64_t>(rows), range, static_cast<int64_t>(grain));
}

at::Tensor numbers_of(const std::vector<int64_t>& places) { return at::tensor(places, at::kLong); }

}  // namespace

PrefixCache::PrefixCache(std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers,
                         bool always)
    : cache_(std::move(cache)), layers_(std::move(layers)), always_(always) {
  if (layers_.empty()) refuse("got no layers", "Pass the frozen ones.");
}

void PrefixCache::RowCost::note(double seconds, size_t rows) {
  if (rows == 0) return;
  const double each = seconds / static_cast<double>(rows);
  seconds_ = is_known_ ? std::min(seconds_, each) : each;
  is_known_ = true;
}

void PrefixCache::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text("cache", got, cache_->where(), next_step));
}

bool PrefixCache::are_as_seen(const PrefixLayers& layers) const {
  size_t place = 0;
  bool are_seen = !hashes_.empty();
  layers.look([&](const at::Tensor& tensor, bool is_parameter) {
    are_seen =
        are_seen && seen_.is_unchanged(place, tensor) && !(is_parameter && tensor.requires_grad());
    ++place;
  });
  return are_seen && place == seen_.size();
}

// Versions are noted in front of the hashes, so that a write in between is found in the next use.
void PrefixCache::see(const PrefixLayers& layers) {
  hashes_.clear();
  SeenTensors now;
  at::Tensor trained;
  layers.look([&](const at::Tensor& tensor, bool is_parameter) {
    if (is_parameter && tensor.requires_grad() && !trained.defined()) trained = tensor;
    now.add(tensor);
  });
  const std::vector<PrefixTensor> tensors = layers.tensors();
  if (trained.defined())
    refuse(
        "got parameter '" + name_in(tensors, trained) + "' that is trained, expected frozen layers",
        "Call requires_grad_(False) on the layers, or freeze them with trireme.Freeze.");
  hash_layers(tensors);
  seen_ = std::move(now);
}

void PrefixCache::hash_layers(const std::vector<PrefixTensor>& tensors) {
  hashes_.clear();
  uint64_t hash = 0;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    std::vector<uint64_t> parts{hash, text_hash(layers_[layer])};
    for (const PrefixTensor& one : tensors) {
      if (one.layer != layer) continue;
      std::string what = c10::str(one.name.substr(one.name.find('.') + 1), " ",
                                  one.tensor.scalar_type(), " ", one.tensor.sizes());
      parts.push_back(text_hash(what));
      parts.push_back(hash_of_values(one.tensor));
    }
    hashes_.push_back(hash = joined(parts));
  }
}

// What else changes what layers return.
std::vector<uint64_t> PrefixCache::keys(const at::Tensor& input) const {
  const c10::DeviceType device = input.device().type();
  const bool casts = at::autocast::is_autocast_enabled(device);
  const auto dtype = casts ? static_cast<uint64_t>(at::autocast::get_autocast_dtype(device)) : 0;
  std::vector<uint64_t> found;
  for (const uint64_t hash : hashes_)
    found.push_back(joined({hash, static_cast<uint64_t>(input.scalar_type()),
                            static_cast<uint64_t>(device), casts ? 1U : 0U, dtype}));
  return found;
}

std::vector<int64_t> PrefixCache::check(const at::Tensor& input, const at::Tensor& ids) const {
  if (input.dim() < 1 || input.layout() != at::kStrided)
    refuse("got an input without rows, expected a dense batch", "Pass a tensor of rows.");
  if (ids.scalar_type() != at::kLong || ids.dim() != 1 || ids.size(0) != input.size(0))
    refuse(c10::str("got ids of ", ids.scalar_type(), " ", ids.sizes(), " for ", input.size(0),
                    " rows, expected an int64 for each"),
           "Pass the number of each row's sample in the data set.");
  const at::Tensor own = ids.to(at::kCPU).contiguous();
  const auto* first = own.const_data_ptr<int64_t>();
  std::vector<int64_t> found(first, first + own.numel());
  for (const int64_t id : found)
    if (id < 0 || id >= cache_->samples())
      refuse(c10::str("got id ", id, ", expected 0 to ", cache_->samples() - 1),
             "Make the cache for all samples of the data set.");
  return found;
}

std::vector<CacheRow> PrefixCache::rows_of(const at::Tensor& input,
                                           const std::vector<int64_t>& ids) {
  const Stopwatch watch;
  const at::Tensor own = resolved(input.detach().to(at::kCPU)).contiguous();
  const size_t bytes = ids.empty() ? 0 : own.nbytes() / ids.size();
  const auto* data = static_cast<const std::byte*>(own.const_data_ptr());
  std::vector<CacheRow> rows(ids.size());
  for_rows(rows.size(), bytes,
           [&](size_t i) { rows[i] = {ids[i], hash_of_bytes(data + i * bytes, bytes)}; });
  hashing_.note(watch.seconds(), ids.size());
  return rows;
}

// Copies the rows that are there. Returns through how many layers each has gone.
std::vector<int64_t> PrefixCache::read(const std::vector<CacheRow>& rows,
                                       const std::vector<uint64_t>& keys, const at::Tensor& into) {
  std::vector<int64_t> depths(rows.size());
  const size_t row_bytes = rows.empty() ? 0 : into.nbytes() / rows.size();
  const Stopwatch watch;
  for_rows(rows.size(), row_bytes, [&](size_t i) {
    depths[i] = cache_->read(rows[i], keys, data_of(into) + i * row_bytes);
  });
  const auto depth = static_cast<int64_t>(keys.size());
  const auto is_there = [&](int64_t through) { return through == depth; };
  if (std::all_of(depths.begin(), depths.end(), is_there))
    reading_.note(watch.seconds(), rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (depths[i] != ActivationCache::kOtherInput) continue;
    turn_off(rows[i].id);
    depths[i] = 0;
  }
  return depths;
}

// Layers draw from a generator of their own, which shows that they do. What draws in another way,
// as compiled layers do, draws from the process's, as other threads may do meanwhile. Then the
// layers run again: they return the same, or it was them.
at::Tensor PrefixCache::run_layers(size_t first, const at::Tensor& input, PrefixLayers& layers) {
  const at::NoGradGuard no_grad;
  std::vector<at::Generator> own{at::detail::createCPUGenerator()};
  std::vector<at::Generator> shared{at::detail::getDefaultCPUGenerator()};
  if (!input.is_cpu()) shared.push_back(at::globalContext().defaultGenerator(input.device()));
  const std::vector<at::Tensor> before = states_of(own);
  const auto somebody_draws = [&](const auto& body) {
    const std::vector<at::Tensor> states = states_of(shared);
    body();
    return !are_equal(states_of(shared), states);
  };
  const ReplicaRandomGuard draws(own.front());
  at::Tensor outputs;
  bool is_random = somebody_draws([&] { outputs = run_once(first, input, layers); });
  if (is_random) {
    at::Tensor again;
    is_random = somebody_draws([&] { again = run_once(first, input, layers); }) &&
                hash_of_values(again) != hash_of_values(outputs);
    outputs = again;
  }
  if (is_random || !are_equal(states_of(own), before))
    refuse("got layers that draw random numbers, whose outputs are others each time",
           "Put them in evaluation mode, or behind the prefix.");
  expect_unchanged(layers);
  return outputs;
}

at::Tensor PrefixCache::run_once(size_t first, const at::Tensor& input, PrefixLayers& layers) {
  const Stopwatch watch;
  at::Tensor outputs = layers.run(first, input);
  if (first == 0) running_.note(watch.seconds(), static_cast<size_t>(input.size(0)));
  if (!outputs.defined() || outputs.dim() < 1 || outputs.size(0) != input.size(0))
    refuse("got layers that do not return a row for each row", "Cache layers in front of these.");
  return outputs;
}

void PrefixCache::expect_unchanged(const PrefixLayers& layers) const {
  size_t place = 0;
  at::Tensor changed;
  layers.look([&](const at::Tensor& tensor, bool) {
    if (!changed.defined() && !seen_.is_unchanged(place, tensor)) changed = tensor;
    ++place;
  });
  if (!changed.defined() && place == seen_.size()) return;
  const std::string name = changed.defined() ? name_in(layers.tensors(), changed) : "layers";
  refuse("got layers that change '" + name + "' when they run",
         "Put them in evaluation mode, or behind the prefix.");
}

bool PrefixCache::stores() const {
  if (always_ || calls_ <= kCallsBeforeAsking || !reading_.is_known() || !running_.is_known())
    return true;
  return hashing_.seconds() + reading_.seconds() < running_.seconds();
}

void PrefixCache::expect_form(const at::Tensor& outputs) const {
  const auto known = cache_->form();
  const std::vector<int64_t> sizes = outputs.sizes().slice(1).vec();
  if (known && known->sizes != sizes)
    refuse(c10::str("got rows of ", at::IntArrayRef(sizes), ", expected ",
                    at::IntArrayRef(known->sizes), " as before"),
           "Pad them to one size, or make a cache for each size.");
}

void PrefixCache::turn_off(int64_t id) {
  if (cache_->is_off()) return;
  cache_->turn_off();
  TORCH_WARN(error_text("cache",
                        c10::str("got another input under id ", id,
                                 " than before, so that the cache is off from now on"),
                        cache_->where(),
                        "Leave augmentation out, put it behind the prefix, or do without."));
}

void PrefixCache::store(const std::vector<CacheRow>& rows, const std::vector<uint64_t>& keys,
                        const at::Tensor& outputs) {
  expect_form(outputs);
  const CacheForm form{outputs.sizes().slice(1).vec(), outputs.scalar_type()};
  if (!cache_->form()) cache_->set_form(form);
  if (cache_->form() != form) return;  // another rank's has another dtype
  const at::Tensor own = resolved(outputs.to(at::kCPU)).contiguous();
  const size_t bytes = form.bytes();
  std::optional<CacheRow> last;
  for (size_t i = 0; i < rows.size(); ++i) {
    bool is_other_input = false;
    auto begun = cache_->begin_store(rows[i], keys, is_other_input);
    if (is_other_input) return turn_off(rows[i].id);
    if (!begun) continue;
    std::memcpy(begun->data(), data_of(own) + i * bytes, bytes);
    begun->end();
    cache_->count({.bytes = static_cast<int64_t>(bytes)});
    last = rows[i];
  }
  if (!last || reading_.is_known()) return;
  // Nothing was read yet: how long that takes must be known by the eighth call.
  const at::Tensor scratch = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  for (int time = 0; time < kTrialReads; ++time) {
    const Stopwatch watch;
    if (cache_->read(*last, keys, data_of(scratch)) > 0) reading_.note(watch.seconds(), 1);
  }
}

at::Tensor PrefixCache::forward(const at::Tensor& input, const at::Tensor& ids,
                                PrefixLayers& layers) {
  const std::vector<int64_t> numbers = check(input, ids);
  const std::lock_guard lock(mutex_);
  const auto depth = static_cast<int64_t>(layers_.size());
  const auto count = static_cast<int64_t>(numbers.size());
  ++calls_;
  if (!are_as_seen(layers)) see(layers);
  if (cache_->is_off()) {
    cache_->count({.misses = count, .depth = depth});
    return run_layers(0, input, layers);
  }
  const std::vector<uint64_t> keys = this->keys(input);
  const std::vector<CacheRow> rows = rows_of(input, numbers);
  at::Tensor found;
  std::vector<int64_t> depths(rows.size());  // layers that each row has gone through
  if (const std::optional<CacheForm> form = cache_->form()) {
    std::vector<int64_t> sizes{count};
    sizes.insert(sizes.end(), form->sizes.begin(), form->sizes.end());
    found = at::empty(sizes, form->dtype);
    depths = read(rows, keys, found);
  }
  const int64_t hits = std::count(depths.begin(), depths.end(), depth);
  cache_->count({.hits = hits, .misses = count - hits, .depth = depth});
  if (std::count(depths.begin(), depths.end(), 0) == count) {
    const at::Tensor outputs = run_layers(0, input, layers);
    if (!cache_->is_off() && stores()) store(rows, keys, outputs);
    return outputs;
  }
  if (hits < count && !complete(found, {input, rows, keys, depths}, layers))
    return run_layers(0, input, layers);
  return found.to(input.device());
}

// Returns whether it could: rows of two dtypes cannot be put together.
bool PrefixCache::complete(const at::Tensor& found, const Batch& batch, PrefixLayers& layers) {
  const c10::Device device = batch.input.device();
  std::map<int64_t, std::vector<int64_t>> places;
  for (size_t i = 0; i < batch.rows.size(); ++i)
    places[batch.depths[i]].push_back(static_cast<int64_t>(i));
  for (const auto& [through, some] : places) {
    if (through == static_cast<int64_t>(batch.keys.size())) continue;
    const at::Tensor chosen = numbers_of(some);
    const at::Tensor from = through == 0 ? batch.input.index_select(0, chosen.to(device))
                                         : found.index_select(0, chosen).to(device);
    const at::Tensor outputs = run_layers(static_cast<size_t>(through), from, layers);
    expect_form(outputs);
    if (outputs.scalar_type() != found.scalar_type()) return false;
    found.index_copy_(0, chosen, outputs.to(at::kCPU));
    std::vector<CacheRow> theirs;
    for (const int64_t place : some) theirs.push_back(batch.rows[static_cast<size_t>(place)]);
    if (!cache_->is_off() && stores()) store(theirs, batch.keys, outputs);
  }
  return true;
}

}  // namespace trireme

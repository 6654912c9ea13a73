#include <trireme/activation/prefix_cache.h>

#include <trireme/common/error.h>
#include <trireme/memory/value_hash.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>

#include <chrono>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

namespace trireme {
namespace {

constexpr int64_t kCallsBeforeAsking = 7;

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

// Returns the state of the generators from which layers may draw.
std::vector<at::Tensor> random_states(const at::Tensor& input) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (!input.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(input.device()));
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

at::Tensor numbers_of(const std::vector<int64_t>& places) { return at::tensor(places, at::kLong); }

}  // namespace

PrefixCache::PrefixCache(std::shared_ptr<ActivationCache> cache, std::vector<std::string> layers,
                         bool always)
    : cache_(std::move(cache)), layers_(std::move(layers)), always_(always) {
  if (layers_.empty()) refuse("got no layers", "Pass the frozen ones.");
}

void PrefixCache::refuse(const std::string& got, const std::string& next_step) const {
  C10_THROW_ERROR(ValueError, error_text("cache", got, cache_->where(), next_step));
}

std::vector<PrefixCache::Seen> PrefixCache::look(const std::vector<PrefixTensor>& tensors) const {
  std::vector<Seen> seen;
  seen.reserve(tensors.size());
  for (const PrefixTensor& one : tensors) {
    if (one.is_parameter && one.tensor.requires_grad())
      refuse("got parameter '" + one.name + "' that is trained, expected frozen layers",
             "Call requires_grad_(False) on the layers, or freeze them with trireme.Freeze.");
    const uint32_t version = one.tensor.is_inference() ? 0 : one.tensor._version();
    seen.push_back({one.tensor.unsafeGetTensorImpl(), version,
                    one.tensor.has_storage() ? one.tensor.const_data_ptr() : nullptr});
  }
  return seen;
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
  const at::Tensor own = input.detach().to(at::kCPU).contiguous();
  const size_t bytes = ids.empty() ? 0 : own.nbytes() / ids.size();
  const auto* data = static_cast<const std::byte*>(own.const_data_ptr());
  std::vector<CacheRow> rows;
  for (size_t i = 0; i < ids.size(); ++i)
    rows.push_back({ids[i], hash_of_bytes(data + i * bytes, bytes)});
  hashing_.seconds += watch.seconds();
  hashing_.rows += static_cast<int64_t>(ids.size());
  return rows;
}

at::Tensor PrefixCache::run_layers(size_t first, const at::Tensor& input,
                                   const std::vector<PrefixTensor>& tensors, const Run& run) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> before = random_states(input);
  const Stopwatch watch;
  at::Tensor outputs = run(first, input);
  if (first == 0) {
    running_.seconds += watch.seconds();
    running_.rows += input.size(0);
  }
  if (!outputs.defined() || outputs.dim() < 1 || outputs.size(0) != input.size(0))
    refuse("got layers that do not return a row for each row", "Cache layers in front of these.");
  if (!are_equal(random_states(input), before))
    refuse("got layers that draw random numbers, whose outputs are others each time",
           "Put them in evaluation mode, or behind the prefix.");
  const std::vector<Seen> now = look(tensors);
  for (size_t i = 0; i < now.size(); ++i)
    if (!(now[i] == seen_[i]))
      refuse("got layers that change '" + tensors[i].name + "' when they run",
             "Put them in evaluation mode, or behind the prefix.");
  return outputs;
}

bool PrefixCache::stores() const {
  if (always_ || calls_ <= kCallsBeforeAsking || reading_.rows == 0 || running_.rows == 0)
    return true;
  return hashing_.each() + reading_.each() < running_.each();
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
  if (cache_->form() != form) return;  // of another dtype, or not known yet
  const at::Tensor own = outputs.to(at::kCPU).contiguous();
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
  if (!last || reading_.rows > 0) return;
  // Nothing was read yet: how long that takes must be known by the eighth call.
  const at::Tensor scratch = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
  const Stopwatch watch;
  if (cache_->read(*last, keys, data_of(scratch)) > 0) reading_ = {watch.seconds(), 1};
}

at::Tensor PrefixCache::forward(const at::Tensor& input, const at::Tensor& ids,
                                const std::vector<PrefixTensor>& tensors, const Run& run) {
  const std::vector<int64_t> numbers = check(input, ids);
  const std::lock_guard lock(mutex_);
  const auto depth = static_cast<int64_t>(layers_.size());
  ++calls_;
  if (std::vector<Seen> now = look(tensors); now != seen_ || hashes_.empty()) {
    hash_layers(tensors);
    seen_ = std::move(now);
  }
  const auto count = static_cast<int64_t>(numbers.size());
  if (cache_->is_off()) {
    cache_->count({.misses = count, .depth = depth});
    return run_layers(0, input, tensors, run);
  }
  const std::vector<uint64_t> keys = this->keys(input);
  const std::vector<CacheRow> rows = rows_of(input, numbers);
  const std::optional<CacheForm> form = cache_->form();
  std::map<int64_t, std::vector<int64_t>> places;  // rows by the layers that they went through
  at::Tensor found;
  if (form) {
    std::vector<int64_t> sizes{count};
    sizes.insert(sizes.end(), form->sizes.begin(), form->sizes.end());
    found = at::empty(sizes, form->dtype);
    const Stopwatch watch;
    for (int64_t i = 0; i < count; ++i) {
      std::byte* into = data_of(found) + static_cast<size_t>(i) * form->bytes();
      int64_t through = cache_->read(rows[static_cast<size_t>(i)], keys, into);
      if (through == ActivationCache::kOtherInput) {
        turn_off(numbers[static_cast<size_t>(i)]);
        through = 0;
      }
      places[through].push_back(i);
    }
    const auto hits = static_cast<int64_t>(places.count(depth) > 0 ? places[depth].size() : 0);
    if (hits == count) {
      reading_.seconds += watch.seconds();
      reading_.rows += hits;
    }
    cache_->count({.hits = hits, .misses = count - hits, .depth = depth});
  } else {
    cache_->count({.misses = count, .depth = depth});
  }
  const bool has_none = !form || static_cast<int64_t>(places[0].size()) == count;
  if (has_none) {
    const at::Tensor outputs = run_layers(0, input, tensors, run);
    if (!cache_->is_off() && stores()) store(rows, keys, outputs);
    return outputs;
  }
  for (const auto& [through, some] : places) {
    if (through == depth || some.empty()) continue;
    const at::Tensor chosen = numbers_of(some);
    const at::Tensor from = through == 0 ? input.index_select(0, chosen.to(input.device()))
                                         : found.index_select(0, chosen).to(input.device());
    const at::Tensor outputs = run_layers(static_cast<size_t>(through), from, tensors, run);
    expect_form(outputs);
    if (outputs.scalar_type() != found.scalar_type()) {
      return run_layers(0, input, tensors, run);  // rows of two dtypes cannot be put together
    }
    found.index_copy_(0, chosen, outputs.to(at::kCPU));
    std::vector<CacheRow> theirs;
    for (const int64_t place : some) theirs.push_back(rows[static_cast<size_t>(place)]);
    if (!cache_->is_off() && stores()) store(theirs, keys, outputs);
  }
  return found.to(input.device());
}

}  // namespace trireme

#include <trireme/memory/bucket_plan.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <sstream>
#include <tuple>
#include <utility>

namespace trireme {
namespace {

struct BucketKey {
  at::ScalarType dtype;
  c10::DeviceType device_type;
  c10::DeviceIndex device_index;

  auto operator<=>(const BucketKey&) const = default;
};

// Fills buckets of one dtype and device one after another, each to its own cap.
class Filler {
 public:
  explicit Filler(const BucketPlanRequest& request) : request_(request) {}

  void add(int64_t index) {
    const ParameterInfo& info = request_.parameters[static_cast<size_t>(index)];
    at::ScalarType dtype = info.reduce_dtype.value_or(info.gradient_dtype());
    if (request_.reduce_dtype && c10::isFloatingType(dtype)) dtype = *request_.reduce_dtype;
    if (info.sparse_gradient) {
      closed_.push_back({dtype, info.device, true, info.numel, {{index, 0, info.numel}}});
      return;
    }
    const BucketKey key{dtype, info.device.type(), info.device.index()};
    auto [entry, is_opened] = open_.try_emplace(key);
    PlannedBucket& bucket = entry->second;
    if (is_opened) bucket = {dtype, info.device, false, 0, {}};
    bucket.slots.push_back({index, bucket.numel, info.numel});
    bucket.numel += info.numel;
    const std::vector<int64_t>& caps = request_.caps.bytes;
    size_t& filled = filled_[key];
    if (bucket.bytes() >= caps[std::min(filled, caps.size() - 1)]) {
      closed_.push_back(std::move(bucket));
      open_.erase(entry);
      ++filled;
    }
  }

  void close() {
    for (auto& [key, bucket] : open_) closed_.push_back(std::move(bucket));
    open_.clear();
  }

  std::vector<PlannedBucket> take() { return std::move(closed_); }

 private:
  const BucketPlanRequest& request_;
  std::map<BucketKey, PlannedBucket> open_;
  std::map<BucketKey, size_t> filled_;
  std::vector<PlannedBucket> closed_;
};

std::string first_and_last(const PlannedBucket& bucket,
                           const std::vector<ParameterInfo>& parameters) {
  const std::string& first = parameters[static_cast<size_t>(bucket.slots.front().parameter)].name;
  if (bucket.slots.size() == 1) return first;
  return first + " .. " + parameters[static_cast<size_t>(bucket.slots.back().parameter)].name;
}

}  // namespace

int64_t PlannedBucket::bytes() const {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

BucketPlan make_bucket_plan(const BucketPlanRequest& request) {
  TORCH_CHECK_VALUE(
      !request.caps.bytes.empty() &&
          std::all_of(request.caps.bytes.begin(), request.caps.bytes.end(),
                      [](int64_t cap) { return cap > 0; }),
      error_text("bucket_plan", "got an empty or non-positive bucket cap, expected bytes > 0", {},
                 "Leave bucket_cap_mb at its default or give positive numbers."));
  Filler filler(request);
  for (const int64_t index : request.order) {
    if (!request.trailing[static_cast<size_t>(index)]) filler.add(index);
  }
  filler.close();
  std::vector<PlannedBucket> leading = filler.take();

  // Sorts buckets by their last gradients: a bucket left open until the end of the list may be
  // ready earlier than one that closed before it.
  std::vector<int64_t> place(request.parameters.size(), 0);
  for (size_t i = 0; i < request.order.size(); ++i) {
    place[static_cast<size_t>(request.order[i])] = static_cast<int64_t>(i);
  }
  const auto earlier = [&](const PlannedBucket& a, const PlannedBucket& b) {
    return place[static_cast<size_t>(a.slots.back().parameter)] <
           place[static_cast<size_t>(b.slots.back().parameter)];
  };
  std::stable_sort(leading.begin(), leading.end(), earlier);

  for (const int64_t index : request.order) {
    if (request.trailing[static_cast<size_t>(index)]) filler.add(index);
  }
  filler.close();
  std::vector<PlannedBucket> trailing = filler.take();
  std::stable_sort(trailing.begin(), trailing.end(), earlier);

  BucketPlan plan{std::move(leading)};
  std::move(trailing.begin(), trailing.end(), std::back_inserter(plan.buckets));
  return plan;
}

std::string to_string(const BucketPlan& plan, const std::vector<ParameterInfo>& parameters) {
  std::ostringstream text;
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    const PlannedBucket& bucket = plan.buckets[i];
    text << "bucket " << i << ": " << bucket.bytes() << " bytes " << c10::toString(bucket.dtype)
         << ' ' << bucket.device << (bucket.sparse ? " sparse" : "") << ", " << bucket.slots.size()
         << (bucket.slots.size() == 1 ? " gradient: " : " gradients: ")
         << first_and_last(bucket, parameters) << '\n';
  }
  return text.str();
}

std::string bucket_label(const BucketPlan& plan, size_t bucket,
                         const std::vector<ParameterInfo>& parameters) {
  return "bucket " + std::to_string(bucket) + ": " +
         first_and_last(plan.buckets[bucket], parameters);
}

}  // namespace trireme

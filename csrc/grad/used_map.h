#pragma once

#include <trireme/common/export.h>
#include <trireme/memory/stream_handoff.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace trireme {

// The parameters used since the last synchronization, and the number of ranks that used them; with
// it, one flag: whether any rank changed what it trains. In the flag's place ranks may compare a
// number. Summed over the ranks it travels behind the last bucket's gradients (4 or 8 bytes per
// parameter), or alone if that bucket cannot carry it.
class TRIREME_API UsedMap {
 public:
  explicit UsedMap(int64_t parameters);

  int64_t numel() const { return parameters_ + 1; }

  void mark_used(int64_t parameter) { used_here_[static_cast<size_t>(parameter)] = true; }
  bool used_here(int64_t parameter) const { return used_here_[static_cast<size_t>(parameter)]; }
  void mark_changed() { changed_here_ = true; }
  bool changed_here() const { return changed_here_; }
  // Compares `number` between ranks whose shares sum up to zero, of `world` that reduce: as many of
  // its lower bits as the sum in fp32 has room for, 12 among up to 31 ranks, none among 1450.
  void compare(int64_t number, int64_t share, int64_t world);

  // Returns a tensor in which the map travels alone, the same one at each call.
  const at::Tensor& own_wire(c10::Device device);
  // Writes this rank's summands into `transport` (numel() floating-point elements, any device).
  void write_to(const at::Tensor& transport, bool shadow) const;
  // Starts to read the sums, in the order of the caller's current stream; `transport` may be
  // written when this returns.
  void start_reading(const at::Tensor& transport);
  // Waits until a device has come to start_reading().
  void finish_reading();

  // Return, as last read, how many ranks used the parameter, and whether any rank announced a
  // change.
  int64_t ranks_using(int64_t parameter) const { return counts_[static_cast<size_t>(parameter)]; }
  bool changed_anywhere() const { return changed_anywhere_; }
  bool numbers_differ() const { return numbers_differ_; }

  bool any_used_here() const;

  // Begins anew when a synchronization is over. Parameters stay marked if `still_counts`, called
  // with each and whether it was used here, returns true.
  void begin_anew(const std::function<bool(size_t parameter, bool used)>& still_counts);

 private:
  int64_t parameters_;
  std::vector<bool> used_here_;
  bool changed_here_ = false;
  float change_ = 1;  // the addend of the flag, more than all that is compared
  float compared_ = 0;
  std::vector<int64_t> counts_;
  bool changed_anywhere_ = false;
  bool numbers_differ_ = false;
  at::Tensor own_wire_;
  at::Tensor read_;  // on the CPU
  std::optional<StreamHandoff> handoff_;
};

}  // namespace trireme

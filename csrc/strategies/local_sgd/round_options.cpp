#include <trireme/strategies/local_sgd/round_options.h>

#include <trireme/common/error.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace trireme {
namespace {

void expect(bool holds, const std::string& got, const char* next_step) {
  TORCH_CHECK_VALUE(holds, error_text(kRoundsArea, got, {}, next_step));
}

}  // namespace

void check(const RoundOptions& options) {
  expect(options.sync_every >= 1,
         c10::str("got sync_every=", options.sync_every,
                  ", expected 1 or more steps from average to average"),
         "Pass another number.");
  expect(options.warmup_steps >= 0,
         c10::str("got warmup_steps=", options.warmup_steps,
                  ", expected 0 or more steps at the begin"),
         "Pass another number.");
  expect(
      options.fragments >= 1,
      c10::str("got fragments=", options.fragments, ", expected 1 or more parts of the parameters"),
      "Pass another number.");
  expect(options.sync_every % options.fragments == 0,
         c10::str("got sync_every=", options.sync_every,
                  ", expected a multiple of fragments=", options.fragments),
         "Pass another number of one of them.");
  expect(options.fragment_sync_delay >= 0 && options.fragment_sync_delay < options.period(),
         c10::str("got fragment_sync_delay=", options.fragment_sync_delay,
                  ", expected 0 or more and less than sync_every / fragments, which is ",
                  options.period()),
         "Pass how many steps a fragment may be on its way.");
  expect(options.fragment_update_alpha >= 0 && options.fragment_update_alpha <= 1,
         c10::str("got fragment_update_alpha=", options.fragment_update_alpha,
                  ", expected a number in [0, 1]"),
         "Pass 0 to go on from what all workers have, 1 from what this worker has.");
  if (options.compression) check(*options.compression);
}

std::string to_string(const RoundOptions& options) {
  const std::string compression =
      options.compression ? to_string(*options.compression) : std::string("None");
  if (!options.has_outer_step)
    return c10::str("LocalSGD(sync_every=", options.sync_every,
                    ", warmup_steps=", options.warmup_steps, ", compression=", compression, ")");
  return c10::str("DiLoCo(sync_every=", options.sync_every, ", fragments=", options.fragments,
                  ", fragment_sync_delay=", options.fragment_sync_delay,
                  ", fragment_update_alpha=", options.fragment_update_alpha,
                  ", compression=", compression, ")");
}

}  // namespace trireme

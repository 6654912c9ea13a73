#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/fsdp/owner_delivery.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace trireme {

// [Note: all-reduce hooks]
//
// A hook is the user's last change of the gradients of one unit, most often a collective among
// ranks that have the same shards: the user's own HSDP. It is called at the end of a backward that
// averages them, when all of them are summed up (over replicas, too) and before they become .grad,
// or are added to it; it changes them in place. It gets one row, in the dtype of the reduction:
// this rank's parts of the unit's gradients, one after the other, each with as many elements as the
// longest of any rank has, zeros behind it. They are divided already, as .grad will be. Parameters
// that no rank has used are zeros there, and get no .grad.
//
// Every rank calls hooks for the same units in the same order, once per unit and dtype of the
// reduction, and with rows of the same length; while no collective of ours is on its way. So a hook
// may use any process group. That is why it does not overlap with backward.
//
// An exception of a hook comes out of backward(); the other ranks are told, and find out in their
// next wait for this one, unless they wait for it in a collective of the hook's: that has its own
// deadline.

// UnitFlags::all_reduce_hook: called by the thread that runs backward, without gradients being
// recorded. May be empty.
using AllReduceHook = std::function<void(at::Tensor& gradients)>;

// Makes `delivery` run these hooks from now on, one per unit. `parameters` has the number of each
// unit's parameters, in the order of the delivery's. Costs a copy of the unit's part there and
// back, and its memory meanwhile.
TRIREME_API void set_all_reduce_hooks(OwnerDelivery& delivery, std::vector<AllReduceHook> hooks,
                                      const std::vector<size_t>& parameters);

}  // namespace trireme

#include <trireme/comm/launch/make_communicator.h>

#include <trireme/comm/backend/shm_communicator.h>
#include <trireme/comm/c10d/c10d_communicator.h>
#include <trireme/comm/c10d/group_device.h>
#include <trireme/common/error.h>

#include <utility>

namespace trireme {
namespace {

// Returns whether Gloo moves CPU tensors; it does under the backend "trireme", too, if all ranks
// are alone on their hosts.
bool is_gloo(c10d::ProcessGroup& group) {
  if (!group.hasBackends() || only_device_of(group)) return false;
  const auto backend = group.getBackend(c10::DeviceType::CPU);
  const auto* shm = dynamic_cast<const ShmBackend*>(backend.get());
  return shm != nullptr ? !shm->uses_memory() : backend->getBackendName() == "gloo";
}

}  // namespace

std::shared_ptr<Communicator> make_communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                c10::intrusive_ptr<c10d::Store> store) {
  TORCH_CHECK_VALUE(group, error_text("comm", "got no process group, expected an initialised one",
                                      {}, "Call trireme::init() (or init_process_group) first."));
  const auto backend = find_shm_backend(*group);
  const bool gloo = is_gloo(*group);
  auto through_c10d = make_c10d_communicator(
      {std::move(group), std::move(store), gloo, /*make_of_part=*/make_communicator});
  if (!backend) return through_c10d;
  return make_shm_communicator(backend, std::move(through_c10d));
}

}  // namespace trireme

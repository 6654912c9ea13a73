#include <trireme/saving/module_redistribute.h>

#include <trireme/comm/launch/launch.h>
#include <trireme/common/error.h>
#include <trireme/saving/held_checkpoint.h>
#include <trireme/saving/module_content.h>

#include <c10/util/Exception.h>

#include <utility>

namespace trireme {

void redistribute(const TrainedModule& source, const TrainedModule& target,
                  std::shared_ptr<Communicator> communicator) {
  if (!communicator) communicator = current_communicator();
  CheckpointRanks ranks{communicator, communicator->device()};
  together(ranks, [&] {
    for (const TrainedModule* trained : {&source, &target}) {
      TORCH_CHECK_VALUE(trained->module != nullptr || trained->optimizer == nullptr,
                        error_text("saving", "got an optimizer without its module", ranks.where(),
                                   "Pass both, or neither."));
      if (trained->module != nullptr) ranks_of(communicator, plain_module(*trained->module));
    }
    TORCH_CHECK_VALUE(source.module == nullptr || source.module != target.module,
                      error_text("saving", "got one module before and after", ranks.where(),
                                 "Make another module, and redistribute into that."));
  });
  const HeldCheckpoint held(content_held(source, ranks), ranks);
  load_content(held, target, LoadedOn::kSomeRanks, ranks);
}

}  // namespace trireme

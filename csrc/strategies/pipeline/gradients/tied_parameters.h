#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/tensor_channel.h>
#include <trireme/common/export.h>
#include <trireme/module/module_parameters.h>
#include <trireme/strategies/pipeline/schedule.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The parameters of a stage. One may be there under several names.
struct StageTensors {
  int64_t rank = 0;
  std::vector<std::string> names = {};
  std::vector<at::Tensor> tensors = {};
};

// One parameter that stages of several ranks have.
struct TiedParameter {
  struct Holder {
    int64_t stage = 0;
    std::string name = {};
  };
  std::vector<Holder> holders = {};  // one per rank, its first one; in the order of stages
};

// Finds parameters that stages of several ranks have, by identity. `stages` are all of them.
TRIREME_API std::vector<TiedParameter> find_tied(const std::vector<StageTensors>& stages);

// [Note: tied parameters]
//
// Every rank that has a stage with such a parameter holds a copy of it. The copies begin with one
// value, that of the first stage, and stay equal because all get the same gradient, bit for bit:
// at the end of a step the ranks send theirs to the rank of the first stage, which adds them up in
// the order of stages and sends back the sum. Optimizers do the rest, each for its own copy.
//
// An optimizer that does something else (another learning rate, none at all) would let copies
// drift apart in silence, and so would a checkpoint that one rank alone loads. So a few elements of
// each copy travel with its gradient, and are compared. They may differ a little: hosts of two
// kinds round differently.

// Keeps copies of tied parameters equal. One thread at a time.
//
// Cost of a step: a message from each rank that holds tied parameters to that of their first stage,
// and one back, with the gradients of all that both hold. Where ranks share memory, the channels
// keep the memory of these two between steps.
class TRIREME_API TiedParameters {
 public:
  // Collective; all ranks give the same schedule and parameters. Throws ValueError for holders that
  // are not stages of different ranks. The communicator outlives it.
  TiedParameters(const PipelineSchedule& schedule, std::vector<TiedParameter> tied,
                 Communicator& communicator);

  // Sets the parameters of a stage of this rank. Returns what is missing among them, or nothing.
  std::string set_parameters(int64_t stage, const NamedParameters& parameters);

  // Gives all copies the values of the first. Collective; called once set_parameters() was called
  // for all stages. Throws ValueError on all ranks where one misses a parameter, or has it with
  // another dtype or other sizes.
  void spread_values();

  // Sum gradients over the copies: into that of the first copy, and from there to the others. Dense
  // and sparse ones make a dense sum, and copies without any get that of the others. Throw
  // c10::Error on one rank at least where copies differ in dtype, sizes, requires_grad or value.
  void add_up(int64_t step);
  void send_sums(int64_t step);

  // Return this rank's copies: those of earlier stages on other ranks, and those that are first. A
  // count of each parameter once leaves out the former.
  std::vector<at::Tensor> later_copies() const { return copies(/*are_first=*/false); }
  std::vector<at::Tensor> first_copies() const { return copies(/*are_first=*/true); }

  // See TensorChannels.
  void forget_before(int64_t step) {
    if (channels_) channels_->forget_before(step);
  }

 private:
  // One parameter in a message.
  struct Item {
    size_t tied;    // its place in tied_
    size_t holder;  // the later one of the two
  };
  // The channels between the rank of first copies and one that has later ones.
  struct Link {
    int64_t first_rank;
    int64_t later_rank;
    std::vector<Item> items = {};
    TensorSender* gradients_to = nullptr;
    TensorReceiver* gradients_from = nullptr;
    TensorSender* sums_to = nullptr;
    TensorReceiver* sums_from = nullptr;
  };

  int64_t rank_of(const TiedParameter::Holder& holder) const {
    return stage_rank_[static_cast<size_t>(holder.stage)];
  }
  void check_holders(int64_t stages) const;
  std::string complaint() const;
  void compare_descriptions();
  TensorMessage pack(const Link& link, int64_t step) const;
  // Compares copies, and returns the gradients, which still lie in the message.
  std::vector<at::Tensor> unpack(const Link& link, TensorMessage message) const;
  void check_copy(const Item& item, const std::string& description, const at::Tensor& sample) const;
  std::vector<at::Tensor> copies(bool are_first) const;
  std::string label_of(int64_t step) const { return c10::str("tied parameters of step ", step); }

  Communicator& communicator_;
  RankOf where_;
  std::vector<int64_t> stage_rank_;
  std::vector<TiedParameter> tied_;
  std::vector<at::Tensor> own_;  // this rank's copies, undefined where it has none
  std::vector<Link> links_;
  std::unique_ptr<TensorChannels> channels_;
};

}  // namespace trireme

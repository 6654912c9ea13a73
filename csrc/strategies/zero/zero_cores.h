#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/strategies/zero/consolidated_state.h>
#include <trireme/strategies/zero/zero.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme {

// The cores of one sharded optimizer, one for its constructor and one for each add_param_group(),
// under both front doors; and its claim on their parameters.
//
// A parameter belongs to one optimizer, since two would both write it. An optimizer that is made
// over all parameters of another, or gets them by add_param_group(), takes over: the other one is
// retired. Parameters come in three steps, claim(), shard() and commit(); until the last one
// undo() brings back what was before. Made by std::make_shared.
class TRIREME_API ZeroCores final : public std::enable_shared_from_this<ZeroCores> {
 public:
  // `retired` is called when another optimizer has taken over.
  ZeroCores(std::shared_ptr<Communicator> communicator, const ZeroOptions& options,
            std::function<void()> retired);
  ~ZeroCores();  // the parameters are free again
  ZeroCores(const ZeroCores&) = delete;
  ZeroCores& operator=(const ZeroCores&) = delete;

  // Returns the one that holds a parameter; null if none does. Any thread may call it.
  static std::shared_ptr<ZeroCores> of(const at::Tensor& parameter);

  // Throws ValueError for a parameter that is given twice, and for some of another optimizer's
  // parameters without the others; then nothing is claimed.
  void claim(const NamedParameters& parameters);
  // Shards what was claimed. Collective. Arms all cores together.
  void shard(NamedParameters parameters);
  // Retires the optimizers that had the parameters before.
  void commit();
  // Gives back what was claimed since commit(), and drops its core: parameters that lay in the
  // memory of the host get copies of their own. Does nothing if nothing was.
  void undo();

  // Return the cores. If another optimizer has taken over, live() throws c10::Error, and all()
  // returns none.
  const std::vector<std::shared_ptr<Zero>>& live() const;
  const std::vector<std::shared_ptr<Zero>>& all() const { return cores_; }
  // Return, for the parameters of all cores in their order, these, their shards on this rank, and
  // who has which.
  std::vector<at::Tensor> parameters() const;
  std::vector<at::Tensor> shards() const;
  std::vector<ShardedParameter> sharded_parameters() const;

  // Return whether no rank has found an inf, and end the step; as those of Zero. Collective.
  bool begin_step(const ZeroStep& step = {});
  void end_step();
  void abandon_step(const std::string& reason) noexcept;
  void zero_grad(bool set_to_none = true);

  // Returns what codes keep of gradients, core by core; nothing where nothing is compressed.
  std::vector<KeptCodes> kept_codes() const;

  // Stage 2; under stage 1 they do nothing.
  void set_synchronize(bool synchronize);
  void set_divisor(double divisor);
  void set_armed_callback(const std::function<void()>& callback);  // for a backward of all cores
  void shadow_backward();

 private:
  struct Claimed {
    at::Tensor parameter;
    std::weak_ptr<ZeroCores> before;
  };
  void check_claim(const NamedParameters& parameters) const;
  void check_all_given(const ZeroCores& other, const std::string& name) const;
  void give_back();
  void retire();
  [[noreturn]] void refuse(const std::string& got, const std::string& next_step) const;

  std::shared_ptr<Communicator> communicator_;
  ZeroOptions options_;
  std::function<void()> retired_;
  std::vector<std::shared_ptr<Zero>> cores_;
  std::vector<Claimed> claimed_;  // since commit()
  size_t committed_ = 0;          // cores
  bool is_retired_ = false;
};

}  // namespace trireme

#pragma once

#include <trireme/comm/communicator.h>
#include <trireme/comm/launch/launch.h>
#include <trireme/comm/named_order.h>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace trireme::horovod {

// Horovod's reductions. An average of integers is truncated.
enum class Op : uint8_t { kAverage, kSum, kAdasum, kMin, kMax };

struct AllreduceOptions {
  // Ranks may issue named operations in any order; unnamed ones are numbered.
  std::string name = {};
  Op op = Op::kAverage;
  double prescale_factor = 1;
  double postscale_factor = 1;
};

// Tensors with names that are the same on all ranks.
struct TRIREME_API NamedTensors {
  // NOLINTBEGIN(google-explicit-constructor): the parameters, whatever holds them
  NamedTensors(std::vector<std::pair<std::string, at::Tensor>> tensors) : all(std::move(tensors)) {}
  NamedTensors(const torch::nn::Module& module);  // parameters and buffers
  template <typename Module>
  NamedTensors(const torch::nn::ModuleHolder<Module>& holder) : NamedTensors(*holder) {}
  // NOLINTEND(google-explicit-constructor)

  std::vector<std::pair<std::string, at::Tensor>> all;
};

// Named operations of the ranks of a group, in one order for all (comm/named_order.h): what ranks
// say of one is compared before anything moves. A thread of its own runs them; any thread issues
// them, and waits. What differs between ranks, and a rank that is gone, throws
// c10::DistBackendError naming the operation and both sides.
class TRIREME_API Session {
 public:
  // Collective. Throws NotImplementedError where no other groups of these ranks can be had.
  explicit Session(std::shared_ptr<Communicator> ranks);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  RankOf where() const { return where_; }

  // Returns the tensor reduced over the ranks; sums of fp16 and bf16 are computed in fp32. Throws
  // ValueError for a name that is in flight, a sparse tensor, and Adasum over other than 2^n ranks.
  at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
  // Writes rank `root`'s values into the tensors of all. Throws ValueError for a root that is none.
  void broadcast_parameters(const NamedTensors& parameters, int64_t root = 0);

  // Returns the ranks once more, for gradients, which move beside operations.
  const std::shared_ptr<Communicator>& gradients() const { return gradients_; }

 private:
  struct Operation {
    std::string kind;
    std::function<void()> work;
    std::promise<void> done = {};
  };

  void issue(NamedOperation named, std::function<void()> work);
  void run();
  void perform(const AgreedOperation& agreed);
  std::string name_for(const std::string& kind);
  std::exception_ptr error_of(const std::string& kind, const std::string& name,
                              const std::string& what) const;

  RankOf where_;
  std::shared_ptr<Communicator> ranks_;
  std::shared_ptr<Communicator> operations_;
  std::shared_ptr<Communicator> gradients_;
  std::unique_ptr<NamedOrder> order_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, std::shared_ptr<Operation>> pending_;
  std::map<std::string, int64_t> unnamed_;
  std::string failure_;
  std::thread thread_;
};

// Horovod's functions, over the one session of this process. All but init() and is_initialized()
// throw ValueError before init() and after shutdown().

// Begins with the group of the Context that trireme::init() made last, or makes one, as that does.
// Collective. Does nothing if it was called before.
TRIREME_API void init(const InitOptions& options = {});
// Ends the session, after the optimizers that use it are gone, and the group that init() has made.
// init() may begin another one.
TRIREME_API void shutdown();
TRIREME_API bool is_initialized();
TRIREME_API Session& session();
TRIREME_API int64_t rank();
TRIREME_API int64_t size();
TRIREME_API at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options = {});
TRIREME_API void broadcast_parameters(const NamedTensors& parameters, int64_t root = 0);

}  // namespace trireme::horovod

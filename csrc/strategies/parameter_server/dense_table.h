#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/bound_module.h>
#include <trireme/strategies/parameter_server/dense_checkpoint.h>
#include <trireme/strategies/parameter_server/dense_steps.h>
#include <trireme/strategies/parameter_server/table.h>
#include <trireme/sync/table_parameters.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::ps {

// One worker's view of a table of dense tensors. parameter_server.h says what its verbs return and
// when they wait. It lives as long as its server.
//
// Every verb throws RuntimeError after close() or leave(), on a rank that only serves, and in a
// forked child; DistBackendError if it waits in vain. A refused call has changed nothing; a push
// that waits in vain for a block that another worker holds (ssp, async) may have stepped others.
// Any thread may call them; the user has to order them with other reads and writes of a module's
// parameters, such as a backward's of their .grad.
class TRIREME_API DenseTable final : public Table {
 public:
  struct Parts {
    TableSteps::Parts steps;
    TablePlan plan;
    std::shared_ptr<HostStore> store;  // the values
    std::shared_ptr<WorkerSession> session;
    bool binds_module = false;  // the module's parameters lie in the store
    Spread spread = {};
    // The table as its user sees it; the spec of the steps is the share of this host.
    std::shared_ptr<const TableSpec> spec = nullptr;
  };
  // Called by the server.
  explicit DenseTable(Parts parts);

  const std::vector<std::string>& tensor_names() const { return spec().names; }
  int64_t size() const { return static_cast<int64_t>(spec().tensors.size()); }
  int64_t memory_bytes() const override;

  // --- a table made of a module ---

  // Fills the module's parameters, in place; moves no byte if they lie in the table's memory.
  // Throws ValueError for a table made of tensors, RuntimeError for a parameter that was written in
  // place.
  void pull();
  // Pushes the .grad of the parameters, times `scale`, and sets it to undefined. A parameter
  // without a gradient is not updated. Throws ValueError for a sparse gradient, or one of another
  // shape or dtype: the dtype is the parameter's, or fp32.
  void push(double scale = 1);
  // Return whether the parameters lie in the table's memory, and whether they may be read: from
  // pull() until clock().
  bool is_bound() const;
  bool is_readable() const;

  // A guard; while it lives every worker may write the parameters, all of them the same values:
  //   { auto writing = table.writing(); torch::load(net, "net.pt"); }
  // Collective over the live workers, at one clock; the first worker's values count. An exception
  // that ends it drops what was written, and the other workers raise. Throws ValueError for a table
  // that is not bound.
  class Writing {
   public:
    explicit Writing(DenseTable& table);
    ~Writing() noexcept(false);
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    DenseTable& table_;
    int exceptions_;
  };
  [[nodiscard]] Writing writing() { return Writing(*this); }
  void begin_writing();
  void end_writing();
  void abandon_writing(const std::string& reason) noexcept;

  // --- a table made of tensors; works for one made of a module, too ---

  // Returns copies on the CPU, without a graph. With `view` it returns the table's own memory, to
  // read only: under bsp it holds that clock's values until clock(), else it changes as others
  // push. Throws ValueError for a view with backup workers, which others may overtake while they
  // read, and on several hosts.
  NamedTensors pull_tensors(bool view = false);
  // Pushes gradients by name, times `scale`; a tensor whose name is missing is not updated. Throws
  // ValueError for an unknown name.
  void push_tensors(const NamedTensors& gradients, double scale = 1);

  // These return at once. Work that need not wait is done by then; the rest is done in wait(), on
  // the calling thread: no background thread exists. A pull's result is the tensors in their order,
  // none for a module. Gradients are taken at once. Under bsp wait() throws RuntimeError for a pull
  // that was still open when clock() was called.
  Pending pull_async();
  Pending pull_tensors_async(bool view = false);
  Pending push_async(double scale = 1);
  Pending push_tensors_async(const NamedTensors& gradients, double scale = 1);

  // --- the server calls these ---

  void before_clock() override;
  void after_clock() override;
  // Gives the module memory of its own, with values of one clock.
  void release_module() override;
  const TableSteps& steps() const override { return steps_; }
  std::vector<at::Tensor> share_tensors() const override;
  size_t count_share_tensors(int64_t host) const override;
  CheckpointContent content(const std::string& prefix, const SharesByHost& shares) const override;
  CheckpointContent expected_of(const CheckpointReader& reader,
                                const std::string& prefix) const override;
  CheckpointContent places(const std::string& prefix) const override;
  void read_rest(const CheckpointReader& reader) override;
  void drop_pushes() override;
  void note_loaded() override;

 private:
  using Gradients = std::vector<at::Tensor>;
  TableSteps& own_steps() override { return steps_; }
  void require_module(std::string_view verb) const;
  void refuse_inside_writing(std::string_view verb, const char* next_step) const;
  void check_view(bool view) const;
  void fill_parameters(const RemoteAnswers& answers);
  NamedTensors read(bool view, const RemoteAnswers& answers);
  NamedTensors named(const std::vector<at::Tensor>& tensors) const;
  void copy_values(const std::vector<at::Tensor>& to, const RemoteAnswers& answers);
  void copy_once(const std::vector<at::Tensor>& to) const;
  RemoteAnswers ask_others();
  RemoteAnswers answers_of_one_clock();
  void wait_for(const RemoteAnswers& answers);
  DenseCheckpoint checkpoint() const { return {steps_, spec(), layout()}; }
  void push_here(const Gradients& own, double scale, const WaitContext& context);
  Gradients gradients_of(int64_t host, const Gradients& gradients) const;
  void push_to_others(const Gradients& gradients, double scale, const WaitContext& context);
  Gradients take_own_gradients();
  Gradients gradients_by_name(const NamedTensors& gradients) const;
  at::Tensor checked_gradient(size_t index, const at::Tensor& gradient) const;
  void push_now(const Gradients& gradients, double scale);
  Pending push_or_keep(Gradients gradients, double scale);

  std::shared_ptr<HostStore> store_;
  std::vector<ParameterInfo> infos_;  // the tensors that the user sees
  DenseSteps steps_;
  std::optional<BoundModule> bound_;
  std::shared_ptr<ParameterTable> keeps_;  // the parameters of the module, until it is released
};

}  // namespace trireme::ps

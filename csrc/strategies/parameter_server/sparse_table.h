#pragma once

#include <trireme/comm/pending.h>
#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/sparse_steps.h>
#include <trireme/strategies/parameter_server/table.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

namespace trireme::ps {

// One worker's view of a table of rows by id. parameter_server.h says when its verbs wait.
//
// Ids are int64 or int32, of any shape and device; rows come and go on that device. A row begins as
// a function of the table's seed and its id (RowInit), and comes into being when it is first pulled
// or pushed. A row that is pulled is never a mixture of two states. A row has its own optimizer
// state and its own number of steps: a row that is not pushed does not move.
// (torch.optim.SparseAdam has one number of steps for all rows.)
//
// Every verb throws RuntimeError after close() or leave(), on a rank that only serves, and in a
// forked child; DistBackendError if it waits in vain, or if there is no memory for more rows. A
// push that waits in vain for a row that another worker holds (ssp, async) may have stepped other
// rows; a refused call has changed nothing. Any thread may call them.
class TRIREME_API SparseTable final : public Table {
 public:
  struct Parts {
    TableSteps::Parts steps;
    TablePlan plan;
    std::shared_ptr<const shm::Segment> rows;  // the memory of a RowPlan
    RowPlan row_plan;
    std::shared_ptr<const void> keeps_rows;
    std::shared_ptr<WorkerSession> session;
    Spread spread = {};
  };
  // Called by the server.
  explicit SparseTable(Parts parts);

  int64_t dim() const { return spec().rows->dim; }
  at::ScalarType dtype() const { return spec().rows->dtype; }
  int64_t memory_bytes() const override;
  int64_t count_rows() const override { return steps_.rows().count_claimed(); }

  // Returns copies of rows: [*ids.shape, dim], without a graph. With `create` off, an id that has
  // no row gives its first values, and no row is made. Throws TypeError for ids of another dtype,
  // ValueError for one outside [0, rows). Under activation checkpointing, ours or torch's, a
  // recomputation gets the rows of its forward.
  at::Tensor pull(const at::Tensor& ids, bool create = true);
  // Pushes gradients [*ids.shape, dim] of the table's dtype or fp32, times `scale`. The gradients
  // of an id that comes several times are summed first. Throws what pull() throws, and ValueError
  // for gradients of another shape, dtype or layout.
  void push(const at::Tensor& ids, const at::Tensor& gradients, double scale = 1);

  // These return at once. Work that need not wait is done by then; the rest is done in wait(), on
  // the calling thread: no background thread exists. A pull's result is one tensor. Under bsp
  // wait() throws RuntimeError for a pull that was still open when clock() was called.
  Pending pull_async(const at::Tensor& ids, bool create = true);
  Pending push_async(const at::Tensor& ids, const at::Tensor& gradients, double scale = 1);

  // Return how many rows have been made, and their ids, ascending, as int64 [size()]. Cost: a look
  // at each row. They wait for no worker, only for other hosts, which are asked for their ids.
  int64_t size();
  at::Tensor ids();

  // Returns ids as int64 on the CPU, contiguous; throws what pull() throws.
  at::Tensor checked_ids(const at::Tensor& ids, std::string_view verb) const;
  const TableSteps& steps() const override { return steps_; }
  std::vector<at::Tensor> share_tensors() const override;
  size_t count_share_tensors(int64_t host) const override;
  CheckpointContent content(const std::string& prefix, const SharesByHost& shares) const override;
  CheckpointContent expected_of(const CheckpointReader& reader,
                                const std::string& prefix) const override;
  void make_room(const CheckpointReader& reader) override;
  CheckpointContent places(const std::string& prefix) const override;
  void read_rest(const CheckpointReader& reader) override;
  void drop_pushes() override;

 private:
  TableSteps& own_steps() override { return steps_; }
  at::Tensor checked_gradients(const at::Tensor& ids, const at::Tensor& gradients) const;
  at::Tensor saved_ids(const CheckpointReader& reader) const;
  // Indices into a list of ids, by the host that keeps the rows.
  using PlacesByHost = std::vector<at::Tensor>;
  struct Asked {
    PlacesByHost places = {};
    RemoteAnswers answers = {};
  };

  PlacesByHost places_by_host(const at::Tensor& ids) const;
  Asked ask_others(const at::Tensor& ids, bool create);
  std::vector<CheckpointTensor> described(int64_t rows) const;
  at::Tensor pull_now(const at::Tensor& ids, bool create);
  at::Tensor gather(const at::Tensor& ids, bool create, const Asked& asked);
  void gather_rows(const at::Tensor& ids, bool create, const at::Tensor& to);
  void push_now(const at::Tensor& ids, const at::Tensor& gradients, double scale);
  void push_here(const at::Tensor& ids, const at::Tensor& gradients, double scale,
                 const WaitContext& context);

  SparseSteps steps_;
  RowSums pushed_;
};

}  // namespace trireme::ps

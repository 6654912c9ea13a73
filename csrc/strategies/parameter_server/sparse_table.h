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

// Is a table of rows by id, as one worker sees it. When its verbs wait is said in
// parameter_server.h.
//
// Ids are int64 or int32, of any shape and device; rows come and go on that device. A row begins as
// a function of the table's seed and its id (RowInit), and comes into being when it is first pulled
// or pushed. A row that is pulled is never a mixture of two states. A row has its own optimizer
// state and its own number of steps: what is not pushed does not move. (torch.optim.SparseAdam has
// one number of steps for all rows.)
//
// Every verb throws RuntimeError after close() or leave(), on a rank that only serves, and in a
// forked child; DistBackendError where it waits in vain, or where there is no memory for more rows.
// A push that waits in vain for a row that another worker holds (ssp, async) may have stepped other
// rows; what is refused has changed nothing. Any thread may call them.
class TRIREME_API SparseTable final : public Table {
 public:
  struct Parts {
    TableSteps::Parts steps;
    TablePlan plan;
    std::shared_ptr<const shm::Segment> rows;  // the memory of a RowPlan
    RowPlan row_plan;
    std::shared_ptr<const void> keeps_rows;
    std::shared_ptr<WorkerDesk> desk;
    Spread spread = {};
  };
  // Is made by the server.
  explicit SparseTable(Parts parts);

  int64_t dim() const { return spec().rows->dim; }
  at::ScalarType dtype() const { return spec().rows->dtype; }
  int64_t memory_bytes() const override;
  int64_t count_rows() const override { return steps_.rows().count_claimed(); }

  // Returns copies of rows: [*ids.shape, dim], without a graph. With `create` off, ids that have no
  // row give its first values, and no row comes into being. Throws TypeError for ids of another
  // dtype, ValueError for one outside [0, rows). In a function of a checkpoint, ours or torch's, a
  // recomputation gets the rows of its forward.
  at::Tensor pull(const at::Tensor& ids, bool create = true);
  // Takes gradients [*ids.shape, dim] of the table's dtype or fp32, times `scale`. Those of an id
  // that comes several times are added first. Throws what pull() throws, and ValueError for
  // gradients of another shape, dtype or layout.
  void push(const at::Tensor& ids, const at::Tensor& gradients, double scale = 1);

  // These return at once. What need not wait is done by then; the rest is done in wait(), on any
  // thread: there is none behind it. The result of a pull is one tensor. Throws RuntimeError from
  // wait() under bsp once clock() was called.
  Pending pull_async(const at::Tensor& ids, bool create = true);
  Pending push_async(const at::Tensor& ids, const at::Tensor& gradients, double scale = 1);

  // Returns how many rows have come into being, and their ids, ascending, as int64 [size()]. Cost:
  // a look at each row. They wait for nobody but other hosts, which are asked for their ids.
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
  // Are places in a list of ids, by the host that keeps the rows.
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
                 const Errand& errand);

  SparseSteps steps_;
  RowSums pushed_;
};

}  // namespace trireme::ps

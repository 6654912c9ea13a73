#pragma once

#include <trireme/common/export.h>
#include <trireme/strategies/parameter_server/row_store.h>
#include <trireme/strategies/parameter_server/row_sums.h>
#include <trireme/strategies/parameter_server/table_steps.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::ps {

// Steps the rows of a sparse table with the gradients that workers push. Under bsp a push is kept
// by shares: row r belongs to share r mod kShares, and the workers that apply a clock divide shares
// as those of a dense table divide blocks.
class TRIREME_API SparseSteps final : public TableSteps {
 public:
  static constexpr int64_t kShares = 64;

  // `plan`: of make_sparse_table_plan(); the rows have memory of their own.
  SparseSteps(Parts parts, TablePlan plan, RowStore::Parts rows, RowPlan row_plan);

  RowStore& rows() { return rows_; }
  const RowStore& rows() const { return rows_; }
  // Returns the dtype that gradients are added in.
  at::ScalarType computed() const { return computed_; }

  // bsp: keeps `pushed`, times `scale`, in the half of this clock, which must be free:
  // bring_to(clock - 1).
  void deposit(const RowSums& pushed, double scale, const WaitContext& context);
  void forget_deposit();
  // ssp and async: steps each of the rows. An exception of a wait leaves the rows before it
  // stepped.
  void step_now(const RowSums& pushed, double scale, const WaitContext& context);

  std::string held_by(int64_t worker) const override;
  int64_t count_torn(std::vector<std::string>& names) const override;

 private:
  // The beginning of a kept push. Rows and gradients follow, share by share.
  struct Kept {
    int64_t next;  // offset of the half's next push; 0: none
    int64_t count;
    std::array<int64_t, kShares + 1> begins;
  };

  void step_block(int64_t share, const ClockStep& step) override;
  std::string name_of(int64_t share) const override;
  void find_or_make(const int64_t* ids, int64_t count, const WaitContext& context);
  void step_row(int64_t row, ConstSpan gradient, double lr, double scale);
  int64_t gradients_in(int64_t count) const;
  void add_share(const Kept& kept, int64_t share, RowSums& sums) const;

  RowStore rows_;
  at::ScalarType computed_;
  std::vector<int64_t> found_;  // rows of the current push
  RowSums sums_;                // sums of a share over workers
  RowSums own_;                 // sums of one worker's pushes of a share
};

}  // namespace trireme::ps

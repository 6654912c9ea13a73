#include <trireme/strategies/parameter_server/sparse_table.h>

#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/worker_desk.h>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace trireme::ps {

SparseTable::SparseTable(SparseTable::Parts parts)
    : Table(parts.steps.spec, parts.steps.board, std::move(parts.desk)),
      steps_(parts.steps, std::move(parts.plan),
             RowStore::Parts{parts.steps.spec, parts.steps.board, std::move(parts.rows),
                             std::move(parts.keeps_rows)},
             parts.row_plan),
      pushed_(parts.row_plan.dim, steps_.computed()) {}

int64_t SparseTable::memory_bytes() const {
  return steps_.plan().used_bytes(board().workers()) + steps_.rows().memory_bytes();
}

int64_t SparseTable::size() const {
  desk().check_open("len");
  return steps_.rows().size();
}

at::Tensor SparseTable::ids() const {
  desk().check_open("ids");
  const std::vector<int64_t> ids = steps_.rows().ids();
  return at::tensor(ids, at::kLong);
}

// --- what is checked first -----------------------------------------------------------------------

at::Tensor SparseTable::checked_ids(const at::Tensor& ids, std::string_view verb) const {
  TORCH_CHECK_TYPE(
      ids.defined() && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt),
      error_text(kPsArea,
                 c10::str(verb, " of table '", name(), "': got ids of ",
                          ids.defined() ? c10::str(ids.scalar_type()) : "nothing",
                          ", expected int64 or int32"),
                 board().where(), "Convert them by ids.long()."));
  at::Tensor found = ids.detach().to(at::kCPU, at::kLong).contiguous();
  const std::optional<int64_t> rows = spec().rows->rows;
  if (!rows) return found;
  const auto* begin = found.const_data_ptr<int64_t>();
  const auto* wrong =
      std::find_if(begin, begin + found.numel(), [&](int64_t id) { return id < 0 || id >= *rows; });
  TORCH_CHECK_VALUE(
      wrong == begin + found.numel(),
      error_text(kPsArea,
                 c10::str(verb, " of table '", name(), "': got id ", *wrong,
                          ", expected ids in [0, ", *rows, ")"),
                 board().where(), "Make the table with more rows, or without a number of them."));
  return found;
}

at::Tensor SparseTable::checked_gradients(const at::Tensor& ids,
                                          const at::Tensor& gradients) const {
  std::vector<int64_t> expected = ids.sizes().vec();
  expected.push_back(dim());
  const auto refuse = [&](const std::string& got, const char* next_step) {
    TORCH_CHECK_VALUE(false,
                      error_text(kPsArea,
                                 c10::str("push of table '", name(), "': got gradients of ", got,
                                          ", expected ", dtype(), " ", at::IntArrayRef(expected)),
                                 board().where(), next_step));
  };
  if (!gradients.defined()) refuse("nothing", "Pass a row per id.");
  if (gradients.layout() != at::kStrided)
    refuse(c10::str("layout ", gradients.layout()), "Pass its ids and values apart.");
  if (gradients.sizes() != at::IntArrayRef(expected))
    refuse(c10::str("shape ", gradients.sizes()), "Pass a row per id.");
  if (gradients.scalar_type() != dtype() && gradients.scalar_type() != at::kFloat)
    refuse(c10::str("dtype ", gradients.scalar_type()), "Cast them to that, or to float32.");
  const at::ScalarType kept = dtype() == at::kDouble ? at::kDouble : gradients.scalar_type();
  return gradients.detach().to(at::kCPU, kept).contiguous();
}

// --- pull ----------------------------------------------------------------------------------------

void SparseTable::gather_rows(const at::Tensor& ids, bool create, const at::Tensor& to) {
  constexpr int64_t kAtOnce = 64;
  const Errand errand = this->errand("pull");
  RowStore& rows = steps_.rows();
  const RowShape& shape = *spec().rows;
  const int64_t row_bytes = dim() * static_cast<int64_t>(to.element_size());
  auto* place = static_cast<std::byte*>(to.data_ptr());
  const auto* id = ids.const_data_ptr<int64_t>();
  std::array<int64_t, kAtOnce> found{};
  for (int64_t begin = 0; begin < ids.numel(); begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, ids.numel() - begin);
    rows.find(id + begin, count, found.data());
    if (create) rows.make(id + begin, count, found.data(), errand);
    for (int64_t i = 0; i < count; ++i)
      if (found[static_cast<size_t>(i)] != RowStore::kNone)
        rows.fetch_values(found[static_cast<size_t>(i)]);
    for (int64_t i = 0; i < count; ++i, place += row_bytes) {
      const int64_t row = found[static_cast<size_t>(i)];
      if (row == RowStore::kNone) {
        fill_row(shape.init, shape.seed, id[begin + i], {place, shape.dtype, shape.dim});
      } else {
        rows.read(row, place, errand);
      }
    }
  }
}

at::Tensor SparseTable::gather(const at::Tensor& ids, bool create) {
  ++desk().counts().pulls;
  desk().settle();
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(dim());
  at::Tensor rows = at::empty(sizes, dtype());
  read_one_clock([&] { gather_rows(ids, create, rows); });
  desk().counts().bytes_pulled += static_cast<int64_t>(rows.nbytes());
  return rows;
}

at::Tensor SparseTable::pull(const at::Tensor& ids, bool create) {
  TRIREME_TRACE("ps.pull");
  desk().check_worker("pull");
  const at::Tensor checked = checked_ids(ids, "pull");
  wait_for(board().clock());
  return gather(checked, create).to(ids.device());
}

Pending SparseTable::pull_async(const at::Tensor& ids, bool create) {
  desk().check_worker("pull");
  at::Tensor checked = checked_ids(ids, "pull");
  if (checked.is_alias_of(ids) && !has_come(board().clock())) checked = checked.clone();
  return pull_later([this, checked, create, device = ids.device()] {
    return std::vector<at::Tensor>{gather(checked, create).to(device)};
  });
}

// --- saving --------------------------------------------------------------------------------------

CheckpointContent SparseTable::places(const std::string& /*prefix*/) const {
  CheckpointContent content;
  content.tensors[kModelTensors];
  std::vector<CheckpointTensor>& rows = content.tensors[kTableTensors];
  const auto add = [&](const char* what, const at::Tensor& tensor) {
    rows.push_back({name() + "." + what, tensor.scalar_type(), tensor.sizes().vec(), {tensor}});
  };
  const RowColumns columns = steps_.rows().columns();
  add("ids", columns.ids);
  add("rows", columns.values);
  add("steps", columns.steps);
  const std::vector<std::string> states = names_of_states(spec().optimizer);
  for (size_t state = 0; state < states.size(); ++state)
    add(states[state].c_str(), columns.states[state]);
  if (has_learning_rate(spec().optimizer)) add("lr", steps_.learning_rate());
  return content;
}

at::Tensor SparseTable::saved_ids(const CheckpointReader& reader) const {
  const std::string of_ids = name() + ".ids";
  const auto& known = reader.tensors(kTableTensors);
  const auto found = known.find(of_ids);
  const bool is_list = found != known.end() && found->second.sizes.size() == 1;
  const at::Tensor ids = at::empty({is_list ? found->second.sizes[0] : 0}, at::kLong);
  reader.read(kTableTensors, {{of_ids, at::kLong, ids.sizes().vec(), {ids}}});
  return ids;
}

CheckpointContent SparseTable::expected_of(const CheckpointReader& reader,
                                           const std::string& prefix) const {
  const at::Tensor ids = saved_ids(reader);
  checked_ids(ids, "load");
  TORCH_CHECK_VALUE(std::get<0>(at::_unique(ids)).numel() == ids.numel(),
                    error_text(kPsArea,
                               c10::str("load: got ids of table '", name(),
                                        "' that come twice, expected each once"),
                               board().where(), "Load a checkpoint that a server has saved."));
  CheckpointContent content = places(prefix);
  for (CheckpointTensor& one : content.tensors[kTableTensors]) {
    if (!one.sizes.empty()) one.sizes[0] = ids.numel();  // the learning rate has no dimension
    one.part = {};
  }
  return content;
}

void SparseTable::make_room(const CheckpointReader& reader) {
  const at::Tensor ids = saved_ids(reader);
  RowStore& rows = steps_.rows();
  rows.clear();
  std::vector<int64_t> places(static_cast<size_t>(ids.numel()), RowStore::kNone);
  rows.make(ids.const_data_ptr<int64_t>(), ids.numel(), places.data(), errand("pull"));
}

void SparseTable::drop_pushes() {
  Table::drop_pushes();
  if (is_bsp()) steps_.forget_deposit();
}

// --- push ----------------------------------------------------------------------------------------

void SparseTable::push_checked(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  const Errand errand = this->errand("push");
  if (!begin_push(errand)) return;
  const auto* id = ids.const_data_ptr<int64_t>();
  const ConstSpan all = span_of(gradients);
  pushed_.begin(ids.numel());
  for (int64_t i = 0; i < ids.numel(); ++i)
    pushed_.add(id[i], slice(all, i * dim(), (i + 1) * dim()));
  is_bsp() ? steps_.deposit(pushed_, scale, errand) : steps_.step_now(pushed_, scale, errand);
  desk().counts().bytes_pushed += static_cast<int64_t>(gradients.nbytes());
}

void SparseTable::push(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  TRIREME_TRACE("ps.push");
  desk().check_worker("push");
  const at::Tensor checked = checked_ids(ids, "push");
  const at::Tensor rows = checked_gradients(ids, gradients);
  finish_pushes();
  push_checked(checked, rows, scale);
}

Pending SparseTable::push_async(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  desk().check_worker("push");
  at::Tensor checked = checked_ids(ids, "push");
  at::Tensor rows = checked_gradients(ids, gradients);
  if (can_push()) {
    finish_pushes();
    push_checked(checked, rows, scale);
    return {};
  }
  if (checked.is_alias_of(ids)) checked = checked.clone();
  if (rows.is_alias_of(gradients)) rows = rows.clone();
  return push_later([this, checked, rows, scale] { push_checked(checked, rows, scale); });
}

}  // namespace trireme::ps

#include <trireme/strategies/parameter_server/sparse_table.h>

#include <trireme/activation/kept_results.h>
#include <trireme/common/dtype_name.h>
#include <trireme/common/resolved.h>
#include <trireme/common/trace.h>
#include <trireme/kernels/span.h>
#include <trireme/strategies/parameter_server/hosts/shard_client.h>
#include <trireme/strategies/parameter_server/worker_session.h>

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
    : Table(parts.steps.spec, parts.steps.board, std::move(parts.session), std::move(parts.spread)),
      steps_(parts.steps, std::move(parts.plan),
             RowStore::Parts{parts.steps.spec, parts.steps.board, std::move(parts.rows),
                             std::move(parts.keeps_rows)},
             parts.row_plan),
      pushed_(parts.row_plan.dim, steps_.computed()) {}

int64_t SparseTable::memory_bytes() const {
  return steps_.plan().used_bytes(board().workers()) + steps_.rows().memory_bytes();
}

int64_t SparseTable::size() {
  const auto turn = session().enter_open("len");
  return remote() == nullptr ? steps_.rows().size() : ids().numel();
}

at::Tensor SparseTable::ids() {
  const auto turn = session().enter_open("ids");
  const at::Tensor own = at::tensor(steps_.rows().ids(), at::kLong);
  if (remote() == nullptr) return own;
  ShareRequest request;
  request.verb = ShareRequest::Verb::kIds;
  request.table = spread().index;
  std::vector<at::Tensor> all{own};
  for (const RemoteAnswer& answer : ask(request))
    all.push_back(remote()->wait(*answer, context_of_answer()).at(0));
  return std::get<0>(at::cat(all).sort());
}

// --- other hosts ---------------------------------------------------------------------------------

// `ids` is a list.
SparseTable::PlacesByHost SparseTable::places_by_host(const at::Tensor& ids) const {
  std::vector<std::vector<int64_t>> places(static_cast<size_t>(layout().hosts));
  const auto* id = ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i)
    places[static_cast<size_t>(host_of(id[i], layout().hosts))].push_back(i);
  PlacesByHost tensors;
  for (const auto& of_host : places) tensors.push_back(at::tensor(of_host, at::kLong));
  return tensors;
}

// Asks the other hosts for their rows, before it waits for this host's.
SparseTable::Asked SparseTable::ask_others(const at::Tensor& ids, bool create) {
  Asked asked;
  if (remote() == nullptr) return asked;
  const at::Tensor list = ids.reshape({-1});
  asked.places = places_by_host(list);
  ShareRequest request;
  request.table = spread().index;
  request.create = create;
  for (const int64_t host : remote()->others()) {
    const at::Tensor& places = asked.places[static_cast<size_t>(host)];
    if (places.numel() == 0) continue;
    asked.answers.push_back(
        remote()->ask(host, request, {list.index_select(0, places)}, context("pull")));
  }
  return asked;
}

// --- what is checked first -----------------------------------------------------------------------

at::Tensor SparseTable::checked_ids(const at::Tensor& ids, std::string_view verb) const {
  TORCH_CHECK_TYPE(
      ids.defined() && (ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt),
      error_text(kPsArea,
                 c10::str(verb, " of table '", name(), "': got ids of ",
                          ids.defined() ? dtype_name(ids.scalar_type()) : "nothing",
                          ", expected int64 or int32"),
                 board().where(), "Convert them by ids.long()."));
  TORCH_CHECK_TYPE(!ids.unsafeGetTensorImpl()->is_python_dispatch(),
                   error_text(kPsArea,
                              c10::str(verb, " of table '", name(),
                                       "': got ids as a subclass of Tensor, expected a plain one"),
                              board().where(), "Pass plain ids."));
  at::Tensor found = resolved(ids.detach().to(at::kCPU, at::kLong)).contiguous();
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
    TORCH_CHECK_VALUE(false, error_text(kPsArea,
                                        c10::str("push of table '", name(), "': got gradients of ",
                                                 got, ", expected ", dtype_name(dtype()), " ",
                                                 at::IntArrayRef(expected)),
                                        board().where(), next_step));
  };
  if (!gradients.defined()) refuse("nothing", "Pass a row per id.");
  if (gradients.unsafeGetTensorImpl()->is_python_dispatch())
    refuse("a subclass of Tensor", "Push a plain tensor: that of a DTensor is full_tensor().");
  if (gradients.layout() != at::kStrided)
    refuse(c10::str("layout ", gradients.layout()), "Pass its ids and values apart.");
  if (gradients.sizes() != at::IntArrayRef(expected))
    refuse(c10::str("shape ", gradients.sizes()), "Pass a row per id.");
  if (gradients.scalar_type() != dtype() && gradients.scalar_type() != at::kFloat)
    refuse(c10::str("dtype ", dtype_name(gradients.scalar_type())),
           "Cast them to that, or to float32.");
  const at::ScalarType kept = dtype() == at::kDouble ? at::kDouble : gradients.scalar_type();
  return resolved(gradients.detach().to(at::kCPU, kept)).contiguous();
}

// --- pull ----------------------------------------------------------------------------------------

void SparseTable::gather_rows(const at::Tensor& ids, bool create, const at::Tensor& to) {
  constexpr int64_t kAtOnce = 64;
  const WaitContext context = this->context("pull");
  RowStore& rows = steps_.rows();
  const RowShape& shape = *spec().rows;
  const int64_t row_bytes = dim() * static_cast<int64_t>(to.element_size());
  auto* place = static_cast<std::byte*>(to.data_ptr());
  const auto* id = ids.const_data_ptr<int64_t>();
  std::array<int64_t, kAtOnce> found{};
  for (int64_t begin = 0; begin < ids.numel(); begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, ids.numel() - begin);
    rows.find(id + begin, count, found.data());
    if (create) rows.make(id + begin, count, found.data(), context);
    for (int64_t i = 0; i < count; ++i)
      if (found[static_cast<size_t>(i)] != RowStore::kNone)
        rows.fetch_values(found[static_cast<size_t>(i)]);
    for (int64_t i = 0; i < count; ++i, place += row_bytes) {
      const int64_t row = found[static_cast<size_t>(i)];
      if (row == RowStore::kNone) {
        fill_row(shape.init, shape.seed, id[begin + i], {place, shape.dtype, shape.dim});
      } else {
        rows.read(row, place, context);
      }
    }
  }
}

at::Tensor SparseTable::gather(const at::Tensor& ids, bool create, const Asked& asked) {
  ++session().counts().pulls;
  session().count_dropped();
  std::vector<int64_t> sizes = ids.sizes().vec();
  sizes.push_back(dim());
  at::Tensor rows = at::empty(sizes, dtype());
  if (remote() == nullptr) {
    read_one_clock([&] { gather_rows(ids, create, rows); });
  } else {
    const at::Tensor list = rows.view({-1, dim()});
    const at::Tensor& own = asked.places[static_cast<size_t>(layout().own_host)];
    const at::Tensor found = at::empty({own.numel(), dim()}, dtype());
    gather_rows(ids.reshape({-1}).index_select(0, own), create, found);
    list.index_copy_(0, own, found);
    for (const RemoteAnswer& answer : asked.answers)
      list.index_copy_(0, asked.places[static_cast<size_t>(answer->host)],
                       remote()->wait(*answer, context_of_answer()).at(0));
  }
  session().counts().bytes_pulled += static_cast<int64_t>(rows.nbytes());
  return rows;
}

at::Tensor SparseTable::pull(const at::Tensor& ids, bool create) {
  TRIREME_TRACE("ps.pull");
  if (!may_be_in_checkpoint()) return pull_now(ids, create).to(ids.device());
  const auto read = [&] { return std::vector<at::Tensor>{pull_now(ids, create)}; };
  return once_per_forward(read).front().to(ids.device());
}

at::Tensor SparseTable::pull_now(const at::Tensor& ids, bool create) {
  session().check_worker("pull");
  const at::Tensor checked = checked_ids(ids, "pull");
  const auto turn = session().enter("pull");
  Asked asked;
  wait_to_read([&] { asked = ask_others(checked, create); });
  return gather(checked, create, asked);
}

Pending SparseTable::pull_async(const at::Tensor& ids, bool create) {
  if (is_checkpoint_under_way()) return pulled({pull(ids, create)});
  session().check_worker("pull");
  at::Tensor checked = checked_ids(ids, "pull");
  const auto turn = session().enter("pull");
  const bool is_read_later = remote() != nullptr || !has_come(board().clock());
  if (is_read_later && checked.is_alias_of(ids)) checked = checked.clone();
  const Asked asked = ask_others(checked, create);
  return pull_later(
      [this, checked, create, asked, device = ids.device()] {
        return std::vector<at::Tensor>{gather(checked, create, asked).to(device)};
      },
      [this, answers = asked.answers] { return have_come(answers); });
}

// --- saving --------------------------------------------------------------------------------------

// Lists the checkpoint's tensors of a table with that number of rows: columns, and the learning
// rate.
std::vector<CheckpointTensor> SparseTable::described(int64_t rows) const {
  std::vector<CheckpointTensor> columns;
  const RowColumns own = steps_.rows().columns();
  const auto add = [&](const std::string& what, const at::Tensor& column) {
    std::vector<int64_t> sizes = column.sizes().vec();
    sizes.front() = rows;
    columns.push_back({name() + "." + what, column.scalar_type(), std::move(sizes)});
  };
  add("ids", own.ids);
  add("rows", own.values);
  add("steps", own.steps);
  const std::vector<std::string> states = names_of_states(spec().optimizer);
  for (size_t state = 0; state < states.size(); ++state) add(states[state], own.states[state]);
  if (has_learning_rate(spec().optimizer)) columns.push_back({name() + ".lr", at::kDouble, {}});
  return columns;
}

size_t SparseTable::count_share_tensors(int64_t /*host*/) const {
  return 3 + static_cast<size_t>(count_states(spec().optimizer));
}

std::vector<at::Tensor> SparseTable::share_tensors() const {
  const RowColumns columns = steps_.rows().columns();
  std::vector<at::Tensor> tensors{columns.ids, columns.values, columns.steps};
  tensors.insert(tensors.end(), columns.states.begin(), columns.states.end());
  return tensors;
}

CheckpointContent SparseTable::content(const std::string& /*prefix*/,
                                       const SharesByHost& shares) const {
  int64_t rows = 0;
  for (const auto& share : shares) rows += share.at(0).numel();
  CheckpointContent content;
  content.tensors[kModelTensors];
  std::vector<CheckpointTensor>& columns = content.tensors[kTableTensors];
  columns = described(rows);
  for (size_t i = 0; i < count_share_tensors(0); ++i) {
    std::vector<at::Tensor> parts;
    for (const auto& share : shares) parts.push_back(share.at(i));
    columns[i].part = {parts.size() == 1 ? parts.front() : at::cat(parts)};
  }
  if (has_learning_rate(spec().optimizer)) columns.back().part = {steps_.learning_rate()};
  return content;
}

CheckpointContent SparseTable::places(const std::string& prefix) const {
  if (layout().hosts == 1) return content(prefix, {share_tensors()});
  CheckpointContent content;
  content.tensors[kModelTensors];
  std::vector<CheckpointTensor>& places = content.tensors[kTableTensors];
  if (has_learning_rate(spec().optimizer))
    places.push_back({name() + ".lr", at::kDouble, {}, {steps_.learning_rate()}});
  return content;
}

// On several hosts, reads a column at a time, and keeps the rows of this host.
void SparseTable::read_rest(const CheckpointReader& reader) {
  if (layout().hosts == 1) return;
  const at::Tensor ids = saved_ids(reader);
  const at::Tensor own = places_by_host(ids)[static_cast<size_t>(layout().own_host)];
  const std::vector<at::Tensor> columns = share_tensors();
  std::vector<CheckpointTensor> saved = described(ids.numel());
  for (size_t i = 1; i < columns.size(); ++i) {
    const at::Tensor column = at::empty(saved[i].sizes, saved[i].dtype);
    saved[i].part = {column};
    reader.read(kTableTensors, {saved[i]});
    columns[i].copy_(column.index_select(0, own));
  }
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
                                           const std::string& /*prefix*/) const {
  const at::Tensor ids = saved_ids(reader);
  checked_ids(ids, "load");
  TORCH_CHECK_VALUE(std::get<0>(at::_unique(ids)).numel() == ids.numel(),
                    error_text(kPsArea,
                               c10::str("load: got ids of table '", name(),
                                        "' that come twice, expected each once"),
                               board().where(), "Load a checkpoint that a server has saved."));
  CheckpointContent content;
  content.tensors[kModelTensors];
  content.tensors[kTableTensors] = described(ids.numel());
  return content;
}

void SparseTable::make_room(const CheckpointReader& reader) {
  at::Tensor ids = saved_ids(reader);
  if (layout().hosts > 1)
    ids = ids.index_select(0, places_by_host(ids)[static_cast<size_t>(layout().own_host)]);
  RowStore& rows = steps_.rows();
  rows.clear();
  std::vector<int64_t> places(static_cast<size_t>(ids.numel()), RowStore::kNone);
  rows.make(ids.const_data_ptr<int64_t>(), ids.numel(), places.data(), context("pull"));
}

void SparseTable::drop_pushes() {
  Table::drop_pushes();
  if (is_bsp()) steps_.forget_deposit();
}

// --- push ----------------------------------------------------------------------------------------

void SparseTable::push_here(const at::Tensor& ids, const at::Tensor& gradients, double scale,
                            const WaitContext& context) {
  const auto* id = ids.const_data_ptr<int64_t>();
  const ConstSpan all = span_of(gradients);
  pushed_.begin(ids.numel());
  for (int64_t i = 0; i < ids.numel(); ++i)
    pushed_.add(id[i], slice(all, i * dim(), (i + 1) * dim()));
  is_bsp() ? steps_.deposit(pushed_, scale, context) : steps_.step_now(pushed_, scale, context);
}

// Pushes to all hosts; the place of the push is free. No other thread of this worker comes in
// between, so that the push is of one clock on all hosts.
void SparseTable::push_now(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  const WaitContext context = this->context("push");
  session().counts().bytes_pushed += static_cast<int64_t>(gradients.nbytes());
  if (remote() == nullptr) return push_here(ids, gradients, scale, context);
  const at::Tensor list = ids.reshape({-1});
  const at::Tensor rows = gradients.reshape({-1, dim()});
  const PlacesByHost places = places_by_host(list);
  const auto part_of = [&](int64_t host) {
    const at::Tensor& own = places[static_cast<size_t>(host)];
    return std::vector<at::Tensor>{list.index_select(0, own), rows.index_select(0, own)};
  };
  ShareRequest request;
  request.verb = ShareRequest::Verb::kPush;
  request.table = spread().index;
  request.number = scale;
  const std::vector<at::Tensor> own = part_of(layout().own_host);
  push_here(own[0], own[1], scale, context);
  for (const int64_t host : remote()->others())
    if (places[static_cast<size_t>(host)].numel() > 0)
      remote()->tell(host, request, part_of(host), context);
}

void SparseTable::push(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  TRIREME_TRACE("ps.push");
  session().check_worker("push");
  const at::Tensor checked = checked_ids(ids, "push");
  const at::Tensor rows = checked_gradients(ids, gradients);
  const auto turn = session().enter("push");
  finish_pushes();
  if (begin_push()) push_now(checked, rows, scale);
}

Pending SparseTable::push_async(const at::Tensor& ids, const at::Tensor& gradients, double scale) {
  session().check_worker("push");
  at::Tensor checked = checked_ids(ids, "push");
  at::Tensor rows = checked_gradients(ids, gradients);
  const auto turn = session().enter("push");
  if (can_push()) {
    finish_pushes();
    if (begin_push()) push_now(checked, rows, scale);
    return {};
  }
  if (checked.is_alias_of(ids)) checked = checked.clone();
  if (rows.is_alias_of(gradients)) rows = rows.clone();
  return push_later([this, checked, rows, scale] { push_now(checked, rows, scale); });
}

}  // namespace trireme::ps

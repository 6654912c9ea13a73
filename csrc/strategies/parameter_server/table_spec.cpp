#include <trireme/strategies/parameter_server/table_spec.h>

#include <trireme/common/dtype_name.h>
#include <trireme/kernels/checks.h>
#include <trireme/module/module_parameters.h>
#include <trireme/sync/table_parameters.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <set>
#include <utility>

namespace trireme::ps {

TableSpec dense(std::string name, const torch::nn::Module& module, Optimizer optimizer,
                DenseOptions options) {
  NamedParameters named = named_parameters(module);
  TableSpec table{std::move(name),    std::move(named.names), std::move(named.tensors),
                  /*is_module=*/true, std::move(optimizer),   options};
  for (const auto& item : module.named_buffers())
    table.buffers.emplace_back(item.key(), item.value());
  return table;
}

TableSpec dense(std::string name, const NamedTensors& tensors, Optimizer optimizer,
                DenseOptions options) {
  return {std::move(name),     tensors.keys(),       tensors.values(),
          /*is_module=*/false, std::move(optimizer), options};
}

TableSpec sparse(std::string name, int64_t dim, Optimizer optimizer, SparseOptions options) {
  return {std::move(name),
          {},
          {},
          /*is_module=*/false,
          std::move(optimizer),
          {options.reduction, options.staleness},
          RowShape{dim, options.init, options.seed, options.dtype, options.rows}};
}

namespace {

std::string complaint_about_rows(const RowShape& rows) {
  if (rows.dim < 1) return c10::str("dim=", rows.dim, ", expected >= 1");
  if (c10::isComplexType(rows.dtype) || !is_supported(rows.dtype))
    return c10::str("dtype ", dtype_name(rows.dtype),
                    ", expected float32, float64, float16 or bfloat16");
  if (rows.rows && *rows.rows < 1) return c10::str("rows=", *rows.rows, ", expected >= 1, or none");
  return complaint_about(rows.init);
}

std::string complaint_about_tensor(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) return c10::str("'", name, "' without a value, expected a tensor");
  if (tensor.layout() != at::kStrided || tensor.is_complex() ||
      !is_supported(tensor.scalar_type())) {
    return c10::str("'", name, "' of dtype ", dtype_name(tensor.scalar_type()), " and layout ",
                    tensor.layout(), ", expected a strided float32, float64, float16 or bfloat16");
  }
  if (tensor.is_meta())
    return c10::str("'", name, "' on the meta device, expected one that has values");
  return {};
}

std::string complaint_about_table(const TableSpec& table, Mode mode) {
  if (table.name.empty()) return "a table without a name, expected one";
  const auto of_table = [&](const std::string& what) {
    return "table '" + table.name + "' with " + what;
  };
  if (table.rows) {
    const std::string wrong = complaint_about_rows(*table.rows);
    if (!wrong.empty()) return of_table(wrong);
  } else if (table.tensors.empty()) {
    return of_table("no tensors, expected at least one");
  } else if (is_rowwise(table.optimizer)) {
    return of_table(trireme::to_string(table.optimizer) +
                    " and dense tensors, expected an optimizer without rows");
  }
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const std::string wrong = complaint_about_tensor(table.names[i], table.tensors[i]);
    if (!wrong.empty()) return of_table(wrong);
    const auto other = table.is_module ? trireme::table_of(table.tensors[i]) : nullptr;
    if (other != nullptr)
      return "'" + table.names[i] + "' for table '" + table.name + "', which table '" +
             other->name + "' keeps, expected one that nobody keeps";
  }
  const std::string wrong = complaint_about(table.optimizer);
  if (!wrong.empty()) return "table '" + table.name + "': " + wrong;
  if (!table.options.staleness) return {};
  if (*table.options.staleness < 0)
    return of_table(c10::str("staleness=", *table.options.staleness, ", expected >= 0"));
  if (mode != Mode::kSsp)
    return of_table(c10::str("staleness=", *table.options.staleness, " under mode='", name_of(mode),
                             "', expected none: only ssp has a bound"));
  return {};
}

}  // namespace

std::string complaint_about(const std::vector<TableSpec>& tables, Mode mode) {
  if (tables.empty()) return "no tables, expected at least one";
  std::set<std::string> names;
  std::set<const at::TensorImpl*> bound;
  for (const TableSpec& table : tables) {
    if (std::string wrong = complaint_about_table(table, mode); !wrong.empty()) return wrong;
    if (!names.insert(table.name).second)
      return "two tables of the name '" + table.name + "', expected one";
    for (size_t i = 0; table.is_module && i < table.tensors.size(); ++i) {
      if (!bound.insert(table.tensors[i].unsafeGetTensorImpl()).second)
        return "'" + table.names[i] + "' of table '" + table.name +
               "' in another table as well, expected it in one";
    }
  }
  return {};
}

std::string to_string(const RowShape& rows) {
  std::string text = c10::str("rows of ", rows.dim, " ", dtype_name(rows.dtype), ", ",
                              to_string(rows.init), ", seed=", rows.seed);
  if (rows.rows) text += c10::str(", rows=", *rows.rows);
  return text;
}

std::string to_string(const TableSpec& table) {
  const std::string kind =
      table.rows ? to_string(*table.rows)
                 : c10::str(table.tensors.size(), table.is_module ? " parameters" : " tensors");
  std::string text =
      c10::str("table '", table.name, "' of ", kind, ", ", trireme::to_string(table.optimizer),
               ", reduction=", table.options.reduction == Reduction::kMean ? "'mean'" : "'sum'");
  if (table.options.staleness) text += c10::str(", staleness=", *table.options.staleness);
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    text += c10::str("\n'", table.names[i], "' of table '", table.name, "' as ",
                     dtype_name(table.tensors[i].scalar_type()), " ", table.tensors[i].sizes());
  }
  return text;
}

}  // namespace trireme::ps

#include <trireme/strategies/parameter_server/hosts/table_shares.h>

#include <trireme/strategies/parameter_server/table_plan.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

// See [Note: a table on several hosts] in table_shares.h.

namespace trireme::ps {

std::vector<TableShare> cut_tensors(const std::vector<ParameterInfo>& tensors, int64_t hosts) {
  std::vector<TableShare> shares;
  std::vector<int64_t> kept(static_cast<size_t>(hosts), 0);  // elements by host
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(tensors.size()); ++tensor) {
    const ParameterInfo& info = tensors[static_cast<size_t>(tensor)];
    const int64_t rows = info.sizes.empty() ? 1 : info.sizes.front();
    if (hosts == 1 || info.numel <= kBlockNumel || rows < hosts) {
      const auto least = std::min_element(kept.begin(), kept.end());
      *least += info.numel;
      shares.push_back({tensor, least - kept.begin(), 0, rows, true});
      continue;
    }
    for (int64_t host = 0; host < hosts; ++host) {
      const int64_t first = rows * host / hosts;
      const int64_t end = rows * (host + 1) / hosts;
      kept[static_cast<size_t>(host)] += info.numel / rows * (end - first);
      shares.push_back({tensor, host, first, end - first, false});
    }
  }
  return shares;
}

at::Tensor rows_of(const at::Tensor& tensor, const TableShare& share) {
  return share.is_whole ? tensor : tensor.narrow(0, share.first, share.rows);
}

std::vector<ParameterInfo> infos_of(const TableSpec& table) {
  std::vector<ParameterInfo> infos;
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    ParameterInfo info;
    info.name = table.names[i];
    info.sizes = table.tensors[i].sizes().vec();
    info.numel = table.tensors[i].numel();
    info.dtype = table.tensors[i].scalar_type();
    infos.push_back(std::move(info));
  }
  return infos;
}

std::vector<TableShare> TableLayout::shares_of(int64_t host) const {
  std::vector<TableShare> found;
  for (const TableShare& share : shares)
    if (share.host == host) found.push_back(share);
  return found;
}

TableLayout layout_of(const TableSpec& table, int64_t hosts, int64_t own_host) {
  TableLayout layout;
  layout.tensors = infos_of(table);
  layout.hosts = hosts;
  layout.own_host = own_host;
  layout.shares = cut_tensors(layout.tensors, hosts);
  layout.own_shares = layout.shares_of(own_host);
  return layout;
}

TableSpec share_of(const TableSpec& table, const TableLayout& layout) {
  if (layout.hosts == 1) return table;
  TableSpec share = table;
  share.names.clear();
  share.tensors.clear();
  share.is_module = false;
  for (const TableShare& own : layout.own_shares) {
    const auto tensor = static_cast<size_t>(own.tensor);
    std::vector<int64_t> sizes = table.tensors[tensor].sizes().vec();
    if (!own.is_whole) sizes.front() = own.rows;
    share.names.push_back(table.names[tensor]);
    share.tensors.push_back(
        at::empty(sizes, at::device(at::kMeta).dtype(table.tensors[tensor].scalar_type())));
  }
  return share;
}

}  // namespace trireme::ps

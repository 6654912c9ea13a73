#include <trireme/strategies/remote/value_tensors.h>

#include <ATen/ATen.h>

namespace trireme::remote {

void change_tensors(Value& value, const std::function<void(at::Tensor&)>& change) {
  const auto change_all = [&](Values& items) {
    for (Value& item : items) change_tensors(item, change);
  };
  if (auto* tensor = std::get_if<at::Tensor>(&value.content)) change(*tensor);
  if (auto* list = std::get_if<List>(&value.content)) change_all(list->items);
  if (auto* tuple = std::get_if<Tuple>(&value.content)) change_all(tuple->items);
  if (auto* dict = std::get_if<Dict>(&value.content)) change_all(dict->values);
}

std::vector<at::Tensor> tensors_of(const Value& value) {
  std::vector<at::Tensor> found;
  // The callback only reads.
  change_tensors(const_cast<Value&>(value), [&](at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

at::Tensor dense(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
}

}  // namespace trireme::remote

#include <trireme/strategies/zero/optimizer_archive.h>

#include <trireme/common/error.h>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <unordered_map>
#include <utility>

namespace trireme {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kFormat = "1.5.0";

int64_t read_number(InputArchive& archive, const std::string& key) {
  at::Tensor number;
  archive.read(key, number);
  return number.item<int64_t>();
}

ArchivedValues read_values(InputArchive& archive) {
  ArchivedValues values;
  for (const std::string& key : archive.keys()) archive.read(key, values[key]);
  return values;
}

void write_values(const ArchivedValues& values, const std::string& key, OutputArchive& archive) {
  OutputArchive nested(archive.compilation_unit());
  for (const auto& [name, value] : values) nested.write(name, value);
  archive.write(key, nested);
}

// Returns the content of an archive as one that can be read.
InputArchive reread(OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, size_t count) {
    bytes.append(static_cast<const char*>(data), count);
    return count;
  });
  InputArchive read;
  read.load_from(bytes.data(), bytes.size());
  return read;
}

}  // namespace

OptimizerArchive read_optimizer_archive(InputArchive& archive) {
  c10::IValue format;
  const bool is_known = archive.try_read("pytorch_version", format) && format.isString() &&
                        format.toStringRef() == kFormat;
  TORCH_CHECK_VALUE(is_known,
                    error_text("zero",
                               "got an archive without an optimizer's state, expected what "
                               "torch::optim::Optimizer::save() writes since torch 1.5",
                               {}, "Save an optimizer of torch::optim, or give yours a save()."));
  OptimizerArchive content;
  std::unordered_map<std::string, ArchivedValues> by_key;
  InputArchive states;
  archive.read("state", states);
  for (const std::string& key : states.keys()) {
    InputArchive state;
    states.read(key, state);
    by_key[key] = read_values(state);
  }
  InputArchive groups;
  archive.read("param_groups", groups);
  const int64_t group_count = read_number(groups, "param_groups/size");
  for (int64_t g = 0; g < group_count; ++g) {
    InputArchive group, options;
    groups.read("param_groups/" + std::to_string(g), group);
    group.read("options", options);
    content.options.push_back(read_values(options));
    content.group_counts.push_back(read_number(group, "params/size"));
    for (int64_t i = 0; i < content.group_counts.back(); ++i) {
      c10::IValue key;
      group.read("params/" + std::to_string(i), key);
      content.states.push_back(std::move(by_key[key.toStringRef()]));
    }
  }
  return content;
}

void write_optimizer_archive(const OptimizerArchive& content, OutputArchive& archive) {
  archive.write("pytorch_version", c10::IValue(kFormat));
  OutputArchive states(archive.compilation_unit());
  for (size_t i = 0; i < content.states.size(); ++i)
    if (!content.states[i].empty()) write_values(content.states[i], std::to_string(i), states);
  archive.write("state", states);

  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", at::tensor(static_cast<int64_t>(content.options.size())));
  size_t parameter = 0;
  for (size_t g = 0; g < content.options.size(); ++g) {
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", at::tensor(content.group_counts[g]));
    for (int64_t i = 0; i < content.group_counts[g]; ++i)
      group.write("params/" + std::to_string(i), c10::IValue(std::to_string(parameter++)));
    write_values(content.options[g], "options", group);
    groups.write("param_groups/" + std::to_string(g), group);
  }
  archive.write("param_groups", groups);
}

OptimizerArchive take_apart(const torch::optim::Optimizer& optimizer) {
  OutputArchive written;
  optimizer.save(written);
  InputArchive archive = reread(written);
  return read_optimizer_archive(archive);
}

void put_into(torch::optim::Optimizer& optimizer, const OptimizerArchive& content) {
  OutputArchive written;
  write_optimizer_archive(content, written);
  InputArchive archive = reread(written);
  optimizer.load(archive);
}

ArchivedValues take_apart(const torch::optim::OptimizerOptions& options) {
  OutputArchive written;
  options.serialize(written);
  InputArchive archive = reread(written);
  return read_values(archive);
}

}  // namespace trireme

#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <string>
#include <vector>

namespace trireme {

// Makes a group of some ranks of `whole`, for the same devices or `only` one; null if one of its
// engines can make none. `name` begins its keys in that group's Store; a part that is made again
// meets under others.
c10::intrusive_ptr<c10d::ProcessGroup> split_group(
    const c10::intrusive_ptr<c10d::ProcessGroup>& whole, const std::vector<int>& ranks,
    const std::string& name, std::optional<c10::DeviceType> only = {});

}  // namespace trireme

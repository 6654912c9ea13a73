#pragma once

#include <string>
#include <string_view>

namespace trireme {

// Throws ValueError in the form of all messages, for a caller's arguments about a pipeline.
[[noreturn]] void refuse_pipeline(const std::string& got, std::string_view next_step);

}  // namespace trireme

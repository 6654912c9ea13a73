#pragma once

#include <sstream>
#include <string>
#include <vector>

namespace trireme {

// Returns the lines of a text, without their ends.
inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream all(text);
  for (std::string line; std::getline(all, line);) lines.push_back(line);
  return lines;
}

}  // namespace trireme

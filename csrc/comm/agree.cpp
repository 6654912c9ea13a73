#include <trireme/comm/agree.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/text_lines.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

namespace trireme {
namespace {

// The first character of a complaint. No description begins with it.
constexpr char kComplaint = '!';

}  // namespace

std::string as_complaint(const std::string& why) { return why.empty() ? why : kComplaint + why; }

std::optional<Complaint> first_complaint(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].empty() && texts[rank].front() == kComplaint)
      return Complaint{rank, texts[rank].substr(1)};
  }
  return std::nullopt;
}

std::optional<TextDifference> first_difference(const std::vector<std::string>& texts,
                                               const char* end) {
  const auto differs = std::find_if(texts.begin(), texts.end(),
                                    [&](const std::string& text) { return text != texts.front(); });
  if (differs == texts.end()) return std::nullopt;
  const std::vector<std::string> first = lines_of(texts.front());
  const std::vector<std::string> other = lines_of(*differs);
  size_t line = 0;
  while (line < std::min(first.size(), other.size()) && first[line] == other[line]) ++line;
  const auto line_of = [&](const std::vector<std::string>& lines) {
    return line < lines.size() ? lines[line] : std::string(end);
  };
  return TextDifference{static_cast<size_t>(differs - texts.begin()), line_of(first),
                        line_of(other)};
}

Comparison compare_texts(const ComparedText& own, Communicator& communicator, c10::Device device) {
  const auto integers = at::TensorOptions().dtype(at::kLong).device(device);
  const auto hash = static_cast<int64_t>(std::hash<std::string>{}(own.text) & ~size_t{1});
  const int64_t number = hash | (own.flag ? 1 : 0);
  at::Tensor all = at::empty({communicator.world()}, integers);
  communicator.all_gather({all}, {at::full({1}, number, integers)}, own.label).wait();
  all = all.cpu();
  Comparison found;
  for (int64_t rank = 0; rank < communicator.world(); ++rank) {
    const int64_t theirs = all.const_data_ptr<int64_t>()[rank];
    found.any_flag = found.any_flag || (theirs & 1) != 0;
    found.are_equal = found.are_equal && (theirs & ~int64_t{1}) == hash;
  }
  return found;
}

std::vector<std::string> distinct_texts(const ComparedText& own, Communicator& communicator,
                                        c10::Device device) {
  if (compare_texts(own, communicator, device).are_equal) return {own.text};
  return gather_texts(own.text, communicator, device);
}

}  // namespace trireme

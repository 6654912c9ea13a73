#pragma once

#include <trireme/comm/communicator.h>

#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [Note: ranks that compare what they were given]
//
// Each rank describes what it was given, in lines, and gets the texts of all (gather_texts.h),
// after compare_texts() where they seldom differ. A rank that cannot use what it was given sends a
// complaint in place of a description. So all ranks throw, and none goes on alone.

// Returns the text of a rank that cannot use what it was given; an empty text for no complaint.
TRIREME_API std::string as_complaint(const std::string& why);

// The complaint of the lowest rank that has one.
struct Complaint {
  size_t rank = 0;
  std::string text = {};
};

TRIREME_API std::optional<Complaint> first_complaint(const std::vector<std::string>& texts);

// Where the text of a rank, the lowest possible one, is not that of rank 0.
struct TextDifference {
  size_t rank = 0;
  std::string first = {};  // the first line that differs, as rank 0 has it
  std::string other = {};  // as `rank` has it
};

// `end` stands for a line of a rank that has fewer.
TRIREME_API std::optional<TextDifference> first_difference(const std::vector<std::string>& texts,
                                                           const char* end = "nothing more");

// One rank's part in a comparison.
struct ComparedText {
  std::string text;
  std::string label;  // what is compared, for errors and traces
  bool flag = false;  // all ranks learn whether one of them has set it
};

struct Comparison {
  bool are_equal = true;
  bool any_flag = false;
};

// Collective: one gather of a number over `device`.
TRIREME_API Comparison compare_texts(const ComparedText& own, Communicator& communicator,
                                     c10::Device device);

// Returns the texts of all ranks, or, where all are equal, one. Collective: as compare_texts() in
// that case, else with gather_texts() behind it.
TRIREME_API std::vector<std::string> distinct_texts(const ComparedText& own,
                                                    Communicator& communicator, c10::Device device);

}  // namespace trireme

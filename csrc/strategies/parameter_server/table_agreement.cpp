#include <trireme/strategies/parameter_server/table_agreement.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/text_lines.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>

namespace trireme::ps {
namespace {

// The first character of the text of a rank whose part is wrong.
constexpr char kComplaint = '!';

std::string describe(const std::vector<TableSpec>& tables, const Options& options, RankOf where) {
  Roles roles;
  try {
    roles = roles_of(options.servers, where);
  } catch (const c10::Error& error) {  // the other ranks raise it, too
    const std::string text = error.msg();
    const size_t begin = std::min(text.find("got "), text.size());
    return std::string(1, kComplaint).append(text, begin, text.rfind(" (rank ") - begin);
  }
  const auto workers = static_cast<int64_t>(roles.workers.size());
  std::string wrong = complaint_about(options, workers);
  if (wrong.empty()) wrong = complaint_about(tables, options.mode);
  if (!wrong.empty()) return std::string(1, kComplaint).append(wrong);
  std::string text = to_string(options, roles);
  for (const TableSpec& table : tables) text.append("\n").append(to_string(table));
  return text;
}

// Returns the first lines that differ between the texts of two ranks.
std::string first_difference(const std::string& first, const std::string& other, size_t rank) {
  const std::vector<std::string> of_first = lines_of(first);
  const std::vector<std::string> of_other = lines_of(other);
  size_t line = 0;
  while (line < std::min(of_first.size(), of_other.size()) && of_first[line] == of_other[line])
    ++line;
  const auto text_of = [&](const std::vector<std::string>& lines) {
    return line < lines.size() ? lines[line] : std::string("nothing more");
  };
  return c10::str("got ", text_of(of_first), " on rank 0 and ", text_of(of_other), " on rank ",
                  rank, ", expected the same on all ranks");
}

}  // namespace

void agree_on_tables(const std::vector<TableSpec>& tables, const Options& options,
                     Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const std::string own = describe(tables, options, where);
  const std::vector<std::string> texts = gather_texts(own, communicator, communicator.device());
  const auto is_complaint = [](const std::string& text) {
    return !text.empty() && text.front() == kComplaint;
  };
  const auto refuse = [&](const std::string& complaint, const std::string& who) {
    const std::string got = complaint.substr(1);
    const bool has_verb = got.find("got ") != std::string::npos;
    const std::string text = (has_verb ? "" : "got ") + got + who;
    TORCH_CHECK_VALUE(false, error_text(kPsArea, text, where,
                                        "Make the server of tables and options that go together."));
  };
  if (is_complaint(own)) refuse(own, "");
  for (size_t rank = 0; rank < texts.size(); ++rank)
    if (is_complaint(texts[rank])) refuse(texts[rank], c10::str(", says rank ", rank));
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    TORCH_CHECK_VALUE(texts[rank] == texts[0],
                      error_text(kPsArea, first_difference(texts[0], texts[rank], rank), where,
                                 "Give all ranks the same tables and options."));
  }
}

}  // namespace trireme::ps

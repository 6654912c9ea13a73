#include <trireme/strategies/parameter_server/table_agreement.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>

namespace trireme::ps {
namespace {

std::string describe(const std::vector<TableSpec>& tables, const Options& options, RankOf where) {
  Roles roles;
  try {
    roles = roles_of(options.servers, where);
  } catch (const c10::Error& error) {  // the other ranks raise it, too
    const std::string text = error.msg();
    const size_t begin = std::min(text.find("got "), text.size());
    return as_complaint(text.substr(begin, text.rfind(" (rank ") - begin));
  }
  const auto workers = static_cast<int64_t>(roles.workers.size());
  std::string wrong = complaint_about(options, workers);
  if (wrong.empty()) wrong = complaint_about(tables, options.mode);
  if (!wrong.empty()) return as_complaint(wrong);
  std::string text = to_string(options, roles);
  for (const TableSpec& table : tables) text.append("\n").append(to_string(table));
  return text;
}

}  // namespace

void agree_on_tables(const std::vector<TableSpec>& tables, const Options& options,
                     Communicator& communicator) {
  const RankOf where = communicator.rank_of();
  const std::string own = describe(tables, options, where);
  const std::vector<std::string> texts = gather_texts(own, communicator, communicator.device());
  const auto refuse = [&](const std::string& complaint, const std::string& who) {
    const bool has_verb = complaint.find("got ") != std::string::npos;
    const std::string text = (has_verb ? "" : "got ") + complaint + who;
    TORCH_CHECK_VALUE(false, error_text(kPsArea, text, where,
                                        "Make the server of tables and options that go together."));
  };
  if (const auto complaint = first_complaint({own})) refuse(complaint->text, "");
  if (const auto complaint = first_complaint(texts))
    refuse(complaint->text, c10::str(", says rank ", complaint->rank));
  const auto differs = first_difference(texts);
  if (!differs) return;
  const std::string got = c10::str("got ", differs->first, " on rank 0 and ", differs->other,
                                   " on rank ", differs->rank, ", expected the same on all ranks");
  TORCH_CHECK_VALUE(false,
                    error_text(kPsArea, got, where, "Give all ranks the same tables and options."));
}

}  // namespace trireme::ps

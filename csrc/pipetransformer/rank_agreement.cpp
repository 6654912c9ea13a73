#include <trireme/pipetransformer/rank_agreement.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/run_together.h>
#include <trireme/common/error.h>
#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <exception>
#include <vector>

namespace trireme {

void refuse_elastic(const std::string& got, const Communicator* ranks,
                    const std::string& next_step) {
  const RankOf where = ranks != nullptr ? ranks->rank_of() : RankOf{};
  C10_THROW_ERROR(ValueError, error_text("pipetransformer", got, where, next_step));
}

void agree_on_ranks(const ComparedOnRanks& compared, const std::function<std::string()>& say,
                    Communicator* ranks) {
  std::string own;
  std::exception_ptr error;
  try {
    own = say();
  } catch (const std::exception& thrown) {
    error = std::current_exception();
    own = as_complaint(one_line(what_of(thrown)));
  }
  std::vector<std::string> texts;
  if (ranks != nullptr) texts = distinct_texts({own, compared.label}, *ranks, ranks->device());
  if (error) std::rethrow_exception(error);
  if (const auto wrong = first_complaint(texts))
    refuse_elastic(c10::str("got what rank ", wrong->rank, " cannot use: ", wrong->text), ranks,
                   "Give all ranks the same.");
  if (const auto found = first_difference(texts))
    refuse_elastic(c10::str("got ", compared.got, ": '", found->first, "' on rank 0, '",
                            found->other, "' on rank ", found->rank),
                   ranks, compared.next_step);
}

void work_on_ranks(const std::string& what, const std::string& next_step,
                   const std::function<void()>& work, Communicator* ranks) {
  if (ranks == nullptr) return work();
  const auto failure = run_together(work, *ranks, ranks->device());
  if (!failure) return;
  if (failure->own) std::rethrow_exception(failure->own);
  refuse_elastic(c10::str("got ", what, ", which rank ", failure->rank, " cannot: ", failure->text),
                 ranks, next_step);
}

}  // namespace trireme

#include <trireme/comm/run_together.h>

#include <trireme/comm/gather_texts.h>
#include <trireme/common/exception_text.h>

#include <c10/util/Exception.h>

namespace trireme {
namespace {

// First letters of the texts of ranks that threw; an empty text means success.
constexpr char kValueError = 'v', kError = 'e';

}  // namespace

std::optional<RankFailure> run_together(const std::function<void()>& work,
                                        Communicator& communicator, c10::Device device) {
  std::exception_ptr own;
  std::string told;
  try {
    work();
  } catch (const c10::ValueError& error) {
    own = std::current_exception();
    told = kValueError + what_of(error);
  } catch (const std::exception& error) {
    own = std::current_exception();
    told = kError + what_of(error);
  }
  const std::vector<std::string> all = gather_texts(told, communicator, device);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    return RankFailure{static_cast<int64_t>(rank), all[rank].substr(1),
                       all[rank].front() == kValueError, own};
  }
  return std::nullopt;
}

}  // namespace trireme

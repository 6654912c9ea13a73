#include <trireme/grad/plan_agreement.h>

#include <trireme/comm/agree.h>
#include <trireme/comm/gather_texts.h>
#include <trireme/common/text_lines.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

namespace trireme {
namespace {

std::string in_brackets(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (size_t i = 0; i < numbers.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
  return text + ']';
}

std::string describe(const ParameterInfo& info) {
  std::ostringstream text;
  text << '\'' << info.name << "' " << c10::toString(info.dtype) << ' ' << in_brackets(info.sizes);
  if (!info.strides.empty()) text << " of strides " << in_brackets(info.strides);
  if (info.gradient_dtype() != info.dtype)
    text << " with gradients in " << c10::toString(info.gradient_dtype());
  text << (info.sparse_gradient ? " sparse" : "") << (info.requires_grad ? "" : " frozen");
  return text.str();
}

std::string without_name(const std::string& description) {
  return description.substr(description.rfind('\'') + 1);
}

// Returns how this rank's parameters differ from those of rank 0; an empty text if they do not.
std::string difference(const std::vector<std::string>& mine,
                       const std::vector<std::string>& theirs) {
  const size_t common = std::min(mine.size(), theirs.size());
  for (size_t i = 0; i < common; ++i) {
    if (mine[i] != theirs[i])
      return "parameter " + std::to_string(i) + " is " + mine[i] + " but rank 0 has " + theirs[i];
  }
  if (mine.size() == theirs.size()) return {};
  const bool more_here = mine.size() > theirs.size();
  return std::to_string(mine.size()) + " parameters but rank 0 has " +
         std::to_string(theirs.size()) + ", the first " +
         (more_here ? "one too many is " + mine[common] : "one missing is " + theirs[common]);
}

// Returns what each rank has to say, if anything.
std::string by_rank(const std::vector<std::string>& texts) {
  std::string all;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    all += (all.empty() ? "" : "; ") + ("on rank " + std::to_string(rank) + ": ") + texts[rank];
  }
  return all;
}

// Describes everything that must be alike when ranks change what they train.
std::string describe_fully(const ParameterChange& change) {
  std::string text;
  for (size_t i = 0; i < change.present.size(); ++i) {
    const ParameterInfo& info = change.present[i];
    text += describe(info) + ' ' + info.device.str().substr(0, info.device.str().find(':')) + ' ' +
            std::to_string(change.earlier[i]) + '\n';
  }
  for (const std::string& line : change.beside) text += line + '\n';
  return text;
}

}  // namespace

std::string describe_change(const ParameterChange& change) {
  std::vector<std::string> changes;
  std::vector<bool> is_kept(change.planned.size(), false);
  for (const int64_t index : change.earlier) {
    if (index >= 0) is_kept[static_cast<size_t>(index)] = true;
  }
  std::unordered_map<std::string, const ParameterInfo*> gone;
  for (size_t i = 0; i < change.planned.size(); ++i) {
    if (!is_kept[i]) gone[change.planned[i].name] = &change.planned[i];
  }
  for (size_t i = 0; i < change.present.size(); ++i) {
    const ParameterInfo& now = change.present[i];
    const auto replaced = gone.find(now.name);
    if (change.earlier[i] >= 0) {
      ParameterInfo was = change.planned[static_cast<size_t>(change.earlier[i])];
      was.name = now.name;  // under which it is found makes no difference
      const std::string before = describe(was);
      if (before == describe(now)) continue;
      changes.push_back('\'' + now.name + "' was" + without_name(before) + ", is" +
                        without_name(describe(now)));
    } else if (replaced != gone.end()) {
      changes.push_back('\'' + now.name + "' was" + without_name(describe(*replaced->second)) +
                        ", is another tensor," + without_name(describe(now)));
      gone.erase(replaced);
    } else {
      changes.push_back(describe(now) + " came in addition");
    }
  }
  for (const ParameterInfo& info : change.planned) {
    const auto found = gone.find(info.name);
    if (found != gone.end() && found->second == &info)
      changes.push_back(describe(info) + " is gone");
  }
  if (changes.empty()) return change.beside.empty() ? "nothing changed" : "buffers changed";
  const size_t more = changes.size() - 1;
  return changes.front() + (more == 0 ? "" : " (and " + std::to_string(more) + " more)");
}

void check_same_change(Communicator& communicator, c10::Device device,
                       const ParameterChange& change, const std::string& area) {
  const ComparedText own{describe_fully(change), "changed parameters"};
  if (compare_texts(own, communicator, device).are_equal) return;
  const std::string changes = by_rank(gather_texts(describe_change(change), communicator, device));
  TORCH_CHECK_VALUE(
      false, error_text(area,
                        "got other parameters than were planned, expected the same change on all "
                        "ranks: " +
                            changes,
                        communicator.rank_of(), "Change the module on every rank alike."));
}

std::string difference_between_ranks(Communicator& communicator, c10::Device device,
                                     const std::vector<ParameterInfo>& parameters,
                                     const std::string& area) {
  if (communicator.world() == 1) return {};
  ComparedText own{{}, "parameter descriptions"};
  for (const ParameterInfo& info : parameters) own.text += describe(info) + '\n';
  if (compare_texts(own, communicator, device).are_equal) return {};
  const std::string of_rank_0 = broadcast_text(own.text, 0, communicator, device);
  const std::string differences = by_rank(
      gather_texts(difference(lines_of(own.text), lines_of(of_rank_0)), communicator, device));
  return error_text(
      area, "got different parameters on different ranks, expected the same: " + differences,
      communicator.rank_of(), "Build the same model on every rank.");
}

AgreedStates agree_on_states(Communicator& communicator, c10::Device device,
                             const std::vector<ParameterInfo>& parameters,
                             const std::vector<ParameterState>& states, bool replans,
                             const std::string& area) {
  // The bytes of one state.
  constexpr int64_t kBytes = 3;
  const auto count = static_cast<int64_t>(states.size()) + 1;  // the last is not a parameter
  const int64_t world = communicator.world();
  at::Tensor own = at::zeros({count, kBytes}, at::kByte);
  auto* bytes = own.mutable_data_ptr<uint8_t>();
  for (const ParameterState& state : states) {
    *bytes++ = static_cast<uint8_t>((state.requires_grad ? 1 : 0) | (state.used ? 2 : 0) |
                                    (state.moved ? 4 : 0));
    *bytes++ = static_cast<uint8_t>(state.dtype);
    *bytes++ = static_cast<uint8_t>(state.gradient_dtype);
  }
  *bytes = replans ? 1 : 0;
  const at::Tensor sent = own.to(device);
  const at::Tensor received = at::empty({world * count * kBytes}, sent.options());
  communicator.all_gather({received}, {sent}, "changed parameter states").wait();
  const at::Tensor host = received.to(at::kCPU);
  const auto* all = host.const_data_ptr<uint8_t>();

  AgreedStates agreed{std::vector<bool>(states.size(), false),
                      std::vector<bool>(states.size(), false)};
  for (int64_t rank = 0; rank < world; ++rank)
    agreed.replans = agreed.replans || all[kBytes * (rank * count + count - 1)] != 0;
  const auto said_by = [&](int64_t rank, size_t parameter) {
    const uint8_t* said = all + kBytes * (rank * count + static_cast<int64_t>(parameter));
    return std::string("requires_grad=") + ((said[0] & 1) != 0 ? "True" : "False") + " on rank " +
           std::to_string(rank) + " (" + c10::toString(static_cast<at::ScalarType>(said[1])) +
           ", gradients in " + c10::toString(static_cast<at::ScalarType>(said[2])) + ')';
  };
  for (int64_t rank = 0; rank < world; ++rank) {
    for (size_t i = 0; i < states.size(); ++i) {
      const uint8_t* theirs = all + kBytes * (rank * count + static_cast<int64_t>(i));
      const uint8_t* first = all + kBytes * static_cast<int64_t>(i);
      agreed.used[i] = agreed.used[i] || (theirs[0] & 2) != 0;
      agreed.moved[i] = agreed.moved[i] || (theirs[0] & 4) != 0;
      const bool same = agreed.replans || (((theirs[0] ^ first[0]) & 1) == 0 &&
                                           theirs[1] == first[1] && theirs[2] == first[2]);
      TORCH_CHECK_VALUE(
          same,
          error_text(area,
                     "got a change of requires_grad or dtype that ranks do not share: '" +
                         parameters[i].name + "' " + said_by(0, i) + " but " + said_by(rank, i),
                     communicator.rank_of(),
                     "Freeze, unfreeze and cast the same parameters on every rank."));
    }
  }
  return agreed;
}

}  // namespace trireme

#pragma once

#include <trireme/comm/pending.h>
#include <trireme/saving/checkpoint.h>
#include <trireme/saving/redistribute_plan.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace trireme {

// One execution of a plan. A message of one contiguous piece goes from the holder's memory to the
// receiver's; other pieces are packed into a message, so a rank takes a few messages of memory
// beside its parts (kMessageBytes each). All ranks go through the messages in one order, so no rank
// waits for one that waits for it.
class PartExchange {
 public:
  // `held` are this rank's parts that the plan was made of, and `needed` those that are written.
  // All outlive it.
  PartExchange(const RedistributePlan& plan, const std::vector<CheckpointTensor>& held,
               const std::vector<CheckpointTensor>& needed, const CheckpointRanks& ranks);

  // Collective. Throws c10::DistBackendError naming the message if a rank is gone or comes too
  // late; after another error on one rank the others raise that rank's text.
  void run();

 private:
  using Piece = RedistributePlan::Piece;
  using Message = RedistributePlan::Message;

  // A message on its way.
  struct Flight {
    std::vector<Pending> pending;
    at::Tensor bytes;
    const Message* message;
    bool is_received;
  };

  void copy_kept() const;
  void exchange();
  void start(const Message& message);
  void finish_first();
  void finish_all();
  at::Tensor bytes_of(const Message& message, bool is_sender) const;
  std::vector<Pending> issue(const Message& message, const std::vector<at::Tensor>& bytes,
                             bool is_sender);
  at::Tensor values_to_send(const Message& message, const Piece& piece) const;
  at::Tensor held_values(const Piece& piece) const;
  at::Tensor values_to_write(const Piece& piece) const;
  at::Tensor place_of(const std::vector<Piece>& pieces, const at::Tensor& first) const;
  void pack(const Message& message, const at::Tensor& bytes) const;
  void unpack(const Flight& flight) const;

  const RedistributePlan& plan_;
  const std::vector<CheckpointTensor>& held_;
  const std::vector<CheckpointTensor>& needed_;
  const CheckpointRanks& ranks_;
  std::unordered_multimap<std::string, size_t> held_by_name_;
  std::unordered_map<std::string, size_t> needed_by_name_;
  std::deque<Flight> flights_;
};

}  // namespace trireme

#pragma once

#include <trireme/common/error.h>
#include <trireme/common/export.h>
#include <trireme/strategies/remote/batches.h>
#include <trireme/strategies/remote/definitions.h>
#include <trireme/strategies/remote/owned_module.h>
#include <trireme/strategies/remote/ref_table.h>
#include <trireme/strategies/remote/served_call.h>
#include <trireme/strategies/remote/serving_threads.h>
#include <trireme/strategies/remote/value.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

namespace trireme::remote {

// The interface through which a call server answers callers. Called by any thread.
class TRIREME_API Replies {
 public:
  virtual ~Replies() = default;
  // Sends an answer. Throws c10::DistBackendError if the caller is gone, and what encode() throws.
  // Returns false if the caller takes nothing before `until`.
  virtual bool reply(int64_t to, const Head& head, const Value& value,
                     shm::Clock::time_point until) = 0;
  // Returns a Ref to an object of this rank.
  virtual RefPtr show(std::shared_ptr<Hosted> object, const std::string& class_name) = 0;
  // Returns this rank's name: "p1 (rank 1)".
  virtual std::string name_of_own() const = 0;
  // Returns whether tensors on a device can be sent to a rank.
  virtual bool reaches_devices(int64_t rank) const = 0;
};

// Runs the calls of other ranks, and answers each call once. Thread-safe.
class TRIREME_API CallServer {
 public:
  // All arguments outlive the server.
  CallServer(Replies& replies, RefTable& refs, ServingThreads& threads, int64_t session)
      : replies_(replies), refs_(refs), threads_(threads), session_(session) {}

  // Hands a call to a thread that runs and answers it, with a failure if need be; a call of a batch
  // waits for others. Called for calls in the order in which they come. Runs no user code.
  void take(ServedCall call);
  // Answers a call that cannot be run.
  void fail(const ServedCall& call, const std::exception_ptr& error) noexcept;
  // Drops the waiting calls of a rank that is gone.
  void forget(int64_t rank) { batches_.forget(rank); }
  // Drops a call that its caller has given up, if it waits for others.
  void forget(int64_t rank, int64_t number) { batches_.forget(rank, number); }

 private:
  std::shared_ptr<const Definition> find_method(ServedCall& call) const;
  void take_into_batch(const std::shared_ptr<const Definition>& method, ServedCall call);
  void serve(ServedCall& call);
  Value run(ServedCall& call);
  Value make_module(const CallMessage& call);
  void serve_batch(const Definition& method, const std::vector<ServedCall>& calls);
  void answer(const ServedCall& call, const Value& result);
  // Finds the object of a call. Throws c10::ValueError for an object that is dead, or of an earlier
  // start.
  RefTable::Found object_of(const CallMessage& call) const;

  Replies& replies_;
  RefTable& refs_;
  ServingThreads& threads_;
  int64_t session_;
  OwnedModules modules_;
  Batches batches_;
};

}  // namespace trireme::remote

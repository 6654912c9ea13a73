#pragma once

#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/stream_transport.h>
#include <trireme/grad/transport.h>

#include <memory>
#include <utility>

namespace trireme {

// The transports of a reducer: its own, and a stream of deposits that takes its place from the
// second synchronized backward on, if ranks share memory and a plan can go that way.
class TRIREME_API TransportSwitch {
 public:
  explicit TransportSwitch(std::unique_ptr<Transport> own)
      : own_(std::move(own)), chosen_(own_.get()) {}

  Transport& own() const { return *own_; }
  bool has_stream() const { return stream_ != nullptr; }
  // Puts another transport in the place of both.
  void replace(std::unique_ptr<Transport> transport);

  // Asks for a stream, once: collective the first time, even if no stream results. Not called when
  // a reducer is made, since one rank alone may copy or unpickle a module.
  void ask_for_stream(const std::shared_ptr<Communicator>& ranks, const BucketLayout& layout,
                      const StreamTransport::Options& options);

  // Chooses the transport of the step, for the plan that the layout has now.
  Transport& choose(const BucketLayout& layout);
  // Returns the transport of the step that runs, or of the one before.
  Transport& chosen() const { return *chosen_; }

 private:
  std::unique_ptr<Transport> own_;
  std::unique_ptr<StreamTransport> stream_;
  bool has_asked_ = false;
  Transport* chosen_;
};

}  // namespace trireme

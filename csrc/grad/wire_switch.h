#pragma once

#include <trireme/grad/bucket_layout.h>
#include <trireme/grad/stream_wire.h>
#include <trireme/grad/wire.h>

#include <memory>
#include <utility>

namespace trireme {

// The wires of a reducer: its own, and a stream of deposits that takes its place from the second
// synchronized backward on, if ranks share memory and a plan can go that way.
class TRIREME_API WireSwitch {
 public:
  explicit WireSwitch(std::unique_ptr<Wire> own) : own_(std::move(own)), chosen_(own_.get()) {}

  Wire& own() const { return *own_; }
  bool has_stream() const { return stream_ != nullptr; }
  // Puts another wire in the place of both.
  void replace(std::unique_ptr<Wire> wire);

  // Asks for a stream, once: collective the first time, even if no stream results. Not called when
  // a reducer is made, since one rank alone may copy or unpickle a module.
  void ask_for_stream(const std::shared_ptr<Communicator>& ranks, const BucketLayout& layout,
                      const StreamWire::Options& options);

  // Chooses the wire of the step, for the plan that the layout has now.
  Wire& choose(const BucketLayout& layout);
  // Returns the wire of the step that runs, or of the one before.
  Wire& chosen() const { return *chosen_; }

 private:
  std::unique_ptr<Wire> own_;
  std::unique_ptr<StreamWire> stream_;
  bool has_asked_ = false;
  Wire* chosen_;
};

}  // namespace trireme

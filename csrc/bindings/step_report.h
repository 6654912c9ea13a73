#pragma once

#include <trireme/grad/step_report.h>

#include <pybind11/pybind11.h>

namespace trireme {

inline pybind11::dict to_dict(const StepReport& report) {
  pybind11::dict dict;
  dict["step"] = report.step;
  dict["forward_ms"] = report.forward_ms;
  dict["backward_ms"] = report.backward_ms;
  dict["waiting_ms"] = report.waiting_ms;
  dict["exposed_comm_ms"] = report.exposed_comm_ms;
  dict["hidden_comm_ms"] = report.hidden_comm_ms;
  dict["streamed"] = report.streamed;
  dict["reduced_bytes"] = report.reduced_bytes;
  dict["buckets"] = report.buckets;
  dict["sent_bytes"] = report.sent_bytes;
  dict["encode_ms"] = report.encode_ms;
  return dict;
}

}  // namespace trireme

#include <trireme/shm/doctor.h>

#include <trireme/bindings/bindings.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

namespace trireme {
namespace {

namespace py = pybind11;
using shm::SeenGroup;
using shm::SeenOperation;
using shm::SeenRank;

// Decodes a label, which may be cut in the middle of a character.
py::str text(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

py::dict to_dict(const SeenOperation& operation) {
  py::dict made;
  made["sequence"] = operation.sequence;
  made["operation"] = text(operation.text);
  made["started_s_ago"] = operation.started_s_ago;
  made["finished_s_ago"] = operation.finished_s_ago;
  return made;
}

py::dict to_dict(const SeenRank& rank) {
  py::list operations;
  for (const SeenOperation& operation : rank.operations) operations.append(to_dict(operation));
  py::dict made;
  made["rank"] = rank.rank;
  made["pid"] = rank.pid;
  made["process"] = rank.process;
  made["state"] = shm::name(rank.state);
  made["failure"] = text(rank.failure);
  made["abandoned"] = text(rank.abandoned);
  made["waits_for"] = text(rank.context);
  made["waits_s"] = rank.wait_s;
  made["behind"] = rank.behind;
  made["operations"] = operations;
  made["deposits"] = text(rank.round);
  made["step"] = text(rank.step);
  made["command"] = text(rank.command);
  made["folder"] = text(rank.folder);
  return made;
}

py::dict to_dict(const SeenGroup& group) {
  py::list ranks;
  for (const SeenRank& rank : group.ranks) ranks.append(to_dict(rank));
  py::dict made;
  made["world"] = group.ranks.front().world;
  made["ranks_on_this_host"] = group.ranks.front().members;
  made["ranks"] = ranks;
  made["verdict"] = text(group.verdict);
  made["suspects"] = group.suspects;
  made["is_well"] = group.is_well;
  return made;
}

py::list to_list(const std::vector<shm::HiddenProcess>& processes) {
  py::list made;
  for (const shm::HiddenProcess& process : processes) {
    py::dict entry;
    entry["pid"] = process.pid;
    entry["why"] = process.why;
    made.append(entry);
  }
  return made;
}

py::dict examine_host(const std::vector<pid_t>& pids, std::chrono::milliseconds patience,
                      int64_t history) {
  shm::Examination found;
  {
    const py::gil_scoped_release without_gil;
    found = shm::examine_host({pids, patience, history});
  }
  py::list groups;
  for (const SeenGroup& group : found.groups) groups.append(to_dict(group));
  py::dict made;
  made["groups"] = groups;
  made["hidden"] = to_list(found.hidden);
  made["sealed"] = to_list(found.sealed);
  return made;
}

}  // namespace

void init_doctor(py::module_& module) {
  module.def("examine_host", &examine_host, py::arg("pids"), py::arg("patience"),
             py::arg("history"), "Who is where, as in shm/doctor.h, in the words of the JSON.");
}

}  // namespace trireme

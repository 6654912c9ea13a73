#include <trireme/bindings/bindings.h>
#include <trireme/common/error.h>
#include <trireme/memory/snapshot.h>
#include <trireme/saving/background_save.h>
#include <trireme/saving/checkpoint_series.h>

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;
using Tensors = std::map<std::string, std::vector<CheckpointTensor>>;
using Texts = std::map<std::string, std::string>;

constexpr std::chrono::milliseconds kBetweenSignals{50};

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

// Waits without the GIL, and lets Python handle signals meanwhile. Returns false when time is over.
bool wait_for(const PendingSave& save, std::optional<double> seconds) {
  const auto begin = std::chrono::steady_clock::now();
  for (;;) {
    std::chrono::milliseconds slice = kBetweenSignals;
    if (seconds) {
      const double left = *seconds * 1e3 - milliseconds_since(begin);
      slice = std::min(slice, std::chrono::milliseconds(left > 0 ? int64_t(left) + 1 : 0));
    }
    {
      const py::gil_scoped_release no_gil;
      if (save.wait_for(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (seconds && milliseconds_since(begin) >= *seconds * 1e3) return false;
  }
}

BackgroundSave make_save(std::string path, int64_t max_file_bytes) {
  BackgroundSave save;
  save.path = std::move(path);
  save.max_file_bytes = max_file_bytes;
  return save;
}

}  // namespace

void bind_pending_save(py::module_& module) {
  using torch::wrap_pybind_function;
  using torch::wrap_pybind_function_no_gil;
  py::class_<PendingSave>(module, "PendingSave")
      .def("wait_for", wrap_pybind_function(&wait_for), py::arg("seconds") = py::none())
      .def("done", &PendingSave::done)
      .def_property_readonly("stall_ms", &PendingSave::stall_ms)
      .def_property_readonly("written_bytes", &PendingSave::written_bytes)
      .def_property_readonly("path", &PendingSave::path);

  module.def("save_checkpoint",
             wrap_pybind_function_no_gil([](const std::string& path, const CheckpointRanks& ranks,
                                            Tensors tensors, Texts texts, int64_t max_file_bytes,
                                            double stall_ms) {
               const auto begin = std::chrono::steady_clock::now();
               const CheckpointContent content{std::move(tensors), std::move(texts)};
               const int64_t bytes = save_checkpoint({path, content, max_file_bytes}, ranks);
               return finished_save(path, bytes, stall_ms + milliseconds_since(begin));
             }),
             py::arg("path"), py::arg("ranks"), py::kw_only(), py::arg("tensors"), py::arg("texts"),
             py::arg("max_file_bytes"), py::arg("stall_ms"));
  using Series = CheckpointSeries;
  py::class_<Series, std::shared_ptr<Series>>(module, "CheckpointSeries")
      .def(py::init(wrap_pybind_function(
               [](const std::string& folder, int64_t keep, int64_t rank, int64_t world) {
                 return std::make_shared<Series>(folder, keep, RankOf{rank, world});
               })),
           py::arg("folder"), py::arg("keep"), py::kw_only(), py::arg("rank"), py::arg("world"))
      .def_property_readonly("folder", &Series::folder)
      .def("path_of", &Series::path_of, py::arg("step"))
      .def("steps", wrap_pybind_function_no_gil(&Series::steps))
      .def("note_damaged", &Series::note_damaged, py::arg("step"))
      .def("make_room", wrap_pybind_function_no_gil(&Series::make_room), py::arg("step"))
      .def(
          "keep_last", [](Series& series, int64_t step) { series.keep_last(step); },
          py::call_guard<py::gil_scoped_release>(), py::arg("step"));

  module.def("communicator_of_saves", wrap_pybind_function_no_gil(&communicator_of_saves),
             py::arg("ranks"));
  module.def("wait_for_earlier_saves", wrap_pybind_function_no_gil(&wait_for_earlier_saves),
             py::arg("ranks"));

  using Stages = std::pair<bool, bool>;
  module.def(
      "save_in_background",
      wrap_pybind_function_no_gil(
          [](std::string path, const CheckpointRanks& ranks, std::shared_ptr<Communicator> saver,
             Tensors tensors, Texts texts, int64_t max_file_bytes, std::vector<at::Tensor> written,
             std::optional<Stages> stages, double stall_ms,
             std::shared_ptr<CheckpointSeries> series, int64_t step) {
            BackgroundSave save = make_save(std::move(path), max_file_bytes);
            save.content = {std::move(tensors), std::move(texts)};
            save.written = std::move(written);
            save.stall_ms = stall_ms;
            if (stages)
              save.check = [stages = *stages](const CheckpointRanks& all) {
                some_rank_has_optimizer(stages.first, stages.second, all);
              };
            if (series) save_as_step(save, std::move(series), step, ranks.where().rank);
            return save_in_background(std::move(save), ranks, std::move(saver));
          }),
      py::arg("path"), py::arg("ranks"), py::arg("saver"), py::kw_only(), py::arg("tensors"),
      py::arg("texts"), py::arg("max_file_bytes"), py::arg("written"), py::arg("stages"),
      py::arg("stall_ms"), py::arg("series"), py::arg("step"));
  // Tells the other ranks, which save, why this one cannot.
  module.def("refuse_to_save",
             wrap_pybind_function_no_gil([](std::string path, const CheckpointRanks& ranks,
                                            std::shared_ptr<Communicator> saver,
                                            const std::string& reason) {
               BackgroundSave save = make_save(std::move(path), 0);
               save.failure =
                   std::make_exception_ptr(c10::ValueError({__func__, __FILE__, __LINE__}, reason));
               save_in_background(std::move(save), ranks, std::move(saver));
             }),
             py::arg("path"), py::arg("ranks"), py::arg("saver"), py::arg("reason"));
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.def("finish_saves", [] { finish_saves(); }, NoGil());
  module.def(
      "abort_saves", [](const std::string& reason) { abort_saves(reason); }, NoGil(),
      py::arg("reason"));
  module.def("has_snapshots", [] { return has_snapshots(); });
  module.def(
      "keep_snapshots_of",
      [](const std::vector<at::Tensor>& tensors) { keep_snapshots_of(tensors); }, NoGil(),
      py::arg("tensors"));
  module.def("keep_all_snapshots", [] { keep_all_snapshots(); }, NoGil());
}

}  // namespace trireme

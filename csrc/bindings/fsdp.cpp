#include <trireme/strategies/fsdp/fsdp.h>

#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/bindings/step_report.h>
#include <trireme/comm/group_memory.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;
using OptionalDtype = std::optional<at::ScalarType>;

// Where parameters hang in Python's modules. Modules are held weakly: they own the group.
struct Place {
  py::weakref module;
  py::str name;
  size_t parameter = 0;
  bool sets_itself = false;  // its class has a __setattr__ of its own, as layers with caches have
};
// The sharded ones are held as Python's objects only: swap_tensors, which Module.to() uses, refuses
// a tensor that C++ holds.
struct Places final : ModuleFace {
  std::vector<Place> places;
  std::vector<py::object> sharded;
  std::vector<py::object> unsharded;  // what modules show

  // Dropped under the GIL.
  static std::shared_ptr<Places> make() {
    return {new Places, [](Places* last) {
              const py::gil_scoped_acquire gil;
              delete last;
            }};
  }

  bool requires_grad(size_t parameter) const override {
    return THPVariable_Unpack(sharded[parameter].ptr()).requires_grad();
  }

  void set_requires_grad(size_t parameter, bool requires_grad) const override {
    THPVariable_Unpack(sharded[parameter].ptr()).set_requires_grad(requires_grad);
  }

  // What is done to a DTensor its local tensor does not count.
  uint32_t version(size_t parameter) const override {
    const at::Tensor& tensor = THPVariable_Unpack(sharded[parameter].ptr());
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
  }

  // The dictionary of the module's parameters, or nothing if that is gone.
  static py::object parameters_of(const Place& place) {
    const py::object module = place.module();
    return module.is_none() ? py::object() : module.attr("_parameters");
  }

  void show(bool are_unsharded) const override {
    const py::gil_scoped_acquire gil;
    const std::vector<py::object>& shown = are_unsharded ? unsharded : sharded;
    for (const Place& place : places) {
      const py::object module = place.module();
      if (module.is_none()) continue;
      if (place.sets_itself)
        py::setattr(module, place.name, shown[place.parameter]);
      else
        module.attr("_parameters")[place.name] = shown[place.parameter];
    }
  }

  // Says whether modules hold the sharded parameters, and these the shards.
  bool are_settled(const ParamGroup& group) const {
    if (group.is_shown()) return true;
    for (const Place& place : places) {
      const py::object parameters = parameters_of(place);
      if (parameters && !py::object(parameters[place.name]).is(sharded[place.parameter]))
        return false;
    }
    for (size_t i = 0; i < sharded.size(); ++i) {
      const py::object local = sharded[i].attr("_local_tensor");
      const ShardedParam& param = group.params()[i];
      if (THPVariable_Unpack(local.ptr()).unsafeGetTensorImpl() !=
              param.sharded().unsafeGetTensorImpl() ||
          !param.lies_in_store())
        return false;
    }
    return true;
  }
};

// A group as Python holds it.
struct PyParamGroup {
  std::shared_ptr<ParamGroup> group;
  std::shared_ptr<Places> places = Places::make();
};

using Spec = std::tuple<std::string, std::vector<int64_t>, at::ScalarType, int64_t, OptionalDtype,
                        OptionalDtype, bool>;

using OffloadRow = std::tuple<std::vector<size_t>, std::vector<size_t>, bool>;

// Takes the parameters whose optimizer's part lies in CPU memory, those of which everything does,
// and whether it is pinned.
void set_offload(ParamGroupRequest& request, const OffloadRow& row) {
  const auto& [optimizers, all, pins_memory] = row;
  for (const size_t one : optimizers) request.specs.at(one).offload = ShardOffload::kOptimizer;
  for (const size_t one : all) request.specs.at(one).offload = ShardOffload::kAll;
  request.pins_memory = pins_memory;
}

std::shared_ptr<PyParamGroup> make_group(const std::vector<Spec>& rows,
                                         std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<Communicator> gathers_with,
                                         c10::Device device, bool always_gathers,
                                         std::shared_ptr<Communicator> reshards_with,
                                         const std::optional<OffloadRow>& offload) {
  ParamGroupRequest request;
  for (const auto& [name, sizes, dtype, dim, param_dtype, reduce_dtype, requires_grad] : rows)
    request.specs.push_back({name, sizes, dtype, dim, param_dtype, reduce_dtype, requires_grad});
  request.communicator = std::move(communicator);
  request.gathers_with = std::move(gathers_with);
  request.device = device;
  request.always_gathers = always_gathers;
  request.reshards_with = std::move(reshards_with);
  if (offload) set_offload(request, *offload);
  auto made = std::make_shared<PyParamGroup>();
  made->group = make_param_group(std::move(request));
  return made;
}

void set_places(PyParamGroup& self,
                const std::vector<std::tuple<py::object, std::string, size_t>>& places,
                const std::vector<py::object>& sharded, std::vector<at::Tensor> leaves,
                const std::vector<py::object>& unsharded) {
  const auto held = Places::make();
  const py::object plain = py::module_::import("torch.nn").attr("Module").attr("__setattr__");
  for (const auto& [module, name, parameter] : places) {
    const py::object own = py::type::of(module).attr("__setattr__");
    held->places.push_back({py::weakref(module), py::str(name), parameter, !own.is(plain)});
  }
  held->sharded = sharded;
  held->unsharded = unsharded;
  std::vector<at::Tensor> shown;
  for (const py::object& one : unsharded) shown.push_back(py::cast<at::Tensor>(one));
  self.places = held;
  self.group->set_face(held, std::move(leaves), std::move(shown));
}

Fsdp::Forward forward_of(const std::shared_ptr<PyParamGroup>& group, bool is_root) {
  return {group ? group->group : nullptr, is_root};
}

void init_param_group(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  using Group = PyParamGroup;
  py::class_<Group, std::shared_ptr<Group>>(module, "ParamGroup")
      .def(py::init(wrap_pybind_function_no_gil(make_group)), py::kw_only(), py::arg("specs"),
           py::arg("communicator"), py::arg("gathers_with") = nullptr,
           py::arg("device") = c10::Device(c10::kCPU), py::arg("always_gathers") = false,
           py::arg("reshards_with") = nullptr, py::arg("offload") = std::nullopt)
      .def_static("gathers_over", &ParamGroup::gathers_over, py::arg("communicator"),
                  py::arg("device"))
      .def_property_readonly("gathers", [](const Group& self) { return self.group->gathers(); })
      .def_property_readonly("gathers_with",
                             [](const Group& self) { return self.group->gathers_with(); })
      .def_property(
          "label", [](const Group& self) { return self.group->label(); },
          [](Group& self, std::string label) { self.group->set_label(std::move(label)); })
      .def("sharded",
           [](const Group& self) {
             std::vector<at::Tensor> shards;
             for (const ShardedParam& param : self.group->params())
               shards.push_back(param.sharded());
             return shards;
           })
      .def("unsharded",
           [](const Group& self) {
             std::vector<at::Tensor> whole;
             for (const ShardedParam& param : self.group->params())
               whole.push_back(param.unsharded());
             return whole;
           })
      .def("write_whole",
           wrap_pybind_function_no_gil(
               [](const Group& self, size_t parameter, const at::Tensor& whole) {
                 self.group->params().at(parameter).write_whole(whole);
               }),
           py::arg("parameter"), py::arg("whole"))
      .def("write_shard",
           wrap_pybind_function_no_gil(
               [](const Group& self, size_t parameter, const at::Tensor& shard) {
                 self.group->params().at(parameter).write_shard(shard);
               }),
           py::arg("parameter"), py::arg("shard"))
      .def(
          "lies_in_store",
          [](const Group& self, size_t parameter) {
            return self.group->params().at(parameter).lies_in_store();
          },
          py::arg("parameter"))
      .def(
          "return_to_store",
          [](const Group& self, size_t parameter) {
            self.group->params().at(parameter).return_to_store();
          },
          py::arg("parameter"))
      .def("set_places", &set_places, py::arg("places"), py::arg("sharded"), py::arg("leaves"),
           py::arg("unsharded"))
      .def_property_readonly(
          "is_settled", [](const Group& self) { return self.places->are_settled(*self.group); })
      .def_property_readonly("is_shown", [](const Group& self) { return self.group->is_shown(); })
      .def_property_readonly("has_unsharded",
                             [](const Group& self) { return self.group->has_unsharded(); })
      .def("share_writes",
           wrap_pybind_function_no_gil([](Group& self) { self.group->share_writes(); }))
      .def("unshard", wrap_pybind_function_no_gil([](Group& self) {
             self.group->unshard();
             self.group->wait_for_unshard();
           }))
      .def("show_unsharded",
           wrap_pybind_function_no_gil([](Group& self) { self.group->show_unsharded(); }))
      .def("show_sharded",
           wrap_pybind_function_no_gil([](Group& self) { self.group->show_sharded(); }))
      .def("reshard", wrap_pybind_function_no_gil([](Group& self) { self.group->reshard(); }))
      .def_property(
          "reshard_after_forward",
          [](const Group& self) { return self.group->reshard_after_forward(); },
          [](Group& self, bool reshard) { self.group->set_reshard_after_forward(reshard); })
      .def("reshard_to_all", [](Group& self) { self.group->reshard_to_all(); })
      .def_property(
          "reshard_after_backward",
          [](const Group& self) { return self.group->reshard_after_backward(); },
          [](Group& self, bool reshard) { self.group->set_reshard_after_backward(reshard); });
}

std::vector<std::shared_ptr<ParamGroup>> groups_of(
    const std::vector<std::shared_ptr<PyParamGroup>>& groups) {
  std::vector<std::shared_ptr<ParamGroup>> held;
  for (const auto& group : groups) held.push_back(group->group);
  return held;
}

// The communicators of all ranks and of those with the same shards, and the one that scatters
// gradients.
using RanksRow = std::tuple<std::shared_ptr<Communicator>, std::shared_ptr<Communicator>,
                            std::shared_ptr<Communicator>>;

std::shared_ptr<Fsdp> make_fsdp(const std::vector<std::shared_ptr<PyParamGroup>>& groups,
                                std::vector<std::string> names, const std::vector<RanksRow>& ranks,
                                std::vector<size_t> ranks_of,
                                std::shared_ptr<Communicator> agrees_with) {
  Fsdp::Request request{groups_of(groups), std::move(names), {}};
  for (const auto& [communicator, replicates_with, scatters_with] : ranks)
    request.ranks.push_back({communicator, replicates_with, scatters_with});
  request.ranks_of = std::move(ranks_of);
  request.agrees_with = std::move(agrees_with);
  return Fsdp::make(std::move(request));
}

template <void (Prefetch::*Set)(const ParamGroup&, const std::vector<const ParamGroup*>&)>
void set_prefetch(Fsdp& fsdp, const std::shared_ptr<PyParamGroup>& group,
                  const std::vector<std::shared_ptr<PyParamGroup>>& ahead) {
  std::vector<const ParamGroup*> held;
  for (const auto& one : ahead) held.push_back(one->group.get());
  (fsdp.prefetch().*Set)(*group->group, held);
}

void set_delivered_callback(Fsdp& fsdp, py::function callback) {
  const auto shared = shared_function(std::move(callback));
  const py::gil_scoped_release no_gil;
  fsdp.reducers().set_delivered_callback([shared](const std::vector<int64_t>& parameters) {
    const py::gil_scoped_acquire gil;
    (*shared)(parameters);
  });
}

void set_python_hooks(Fsdp& fsdp, const std::vector<std::optional<py::function>>& groups) {
  std::vector<AllReduceHook> hooks;
  for (const std::optional<py::function>& hook : groups) {
    hooks.emplace_back();
    if (!hook) continue;
    hooks.back() = [shared = shared_function(*hook)](at::Tensor& gradients) {
      const py::gil_scoped_acquire gil;
      (*shared)(gradients);
    };
  }
  const py::gil_scoped_release no_gil;
  fsdp.set_all_reduce_hooks(std::move(hooks));
}

using Groups =
    std::pair<c10::intrusive_ptr<c10d::ProcessGroup>, c10::intrusive_ptr<c10d::ProcessGroup>>;

bool allocate_from(Fsdp& fsdp, const std::optional<Groups>& groups) {
  BufferPool::Source gathered;
  BufferPool::Source gradients;
  if (groups) {
    gathered = memory_of(groups->first, fsdp.device());
    gradients = memory_of(groups->second, fsdp.device());
  }
  const bool has_memory = gathered && gradients;
  fsdp.set_memory_sources(std::move(gathered), gradients);
  return has_memory;
}

void init_fsdp_gathers(py::class_<Fsdp, std::shared_ptr<Fsdp>>& fsdp) {
  using torch::wrap_pybind_function_no_gil;
  using Group = std::shared_ptr<PyParamGroup>;
  fsdp.def("unshard", wrap_pybind_function_no_gil([](Fsdp& self, const Group& group) {
             self.unshard(*group->group);
           }),
           py::arg("group"))
      .def("begin_unshard", wrap_pybind_function_no_gil([](Fsdp& self, const Group& group) {
             self.begin_unshard(*group->group);
           }),
           py::arg("group"))
      .def("reshard", wrap_pybind_function_no_gil([](Fsdp& self, const Group& group) {
             self.reshard(*group->group);
           }),
           py::arg("group"))
      .def("set_forward_prefetch", &set_prefetch<&Prefetch::set_forward_prefetch>, py::arg("group"),
           py::arg("ahead"))
      .def("set_backward_prefetch", &set_prefetch<&Prefetch::set_backward_prefetch>,
           py::arg("group"), py::arg("ahead"))
      .def(
          "set_dynamic_gather",
          [](Fsdp& self, bool dynamic) { self.prefetch().set_dynamic(dynamic); },
          py::arg("dynamic"))
      .def("abandon_forward",
           wrap_pybind_function_no_gil([](Fsdp& self, const std::shared_ptr<PyParamGroup>& group,
                                          bool is_root, const std::string& reason) {
             self.abandon_forward(forward_of(group, is_root), reason);
           }),
           py::arg("group"), py::arg("is_root"), py::arg("reason"));
}

}  // namespace

void init_fsdp(py::module_& module) {
  init_param_group(module);
  using torch::wrap_pybind_function_no_gil;
  py::class_<Fsdp, std::shared_ptr<Fsdp>> fsdp(module, "Fsdp");
  init_fsdp_gathers(fsdp);
  fsdp.def(py::init(wrap_pybind_function_no_gil(make_fsdp)), py::kw_only(), py::arg("groups"),
           py::arg("names"), py::arg("ranks"), py::arg("ranks_of"),
           py::arg("agrees_with") = nullptr)
      .def("pre_forward",
           wrap_pybind_function_no_gil([](Fsdp& fsdp, const std::shared_ptr<PyParamGroup>& group,
                                          bool is_root, const std::vector<at::Tensor>& inputs) {
             fsdp.pre_forward(forward_of(group, is_root), inputs);
           }),
           py::arg("group"), py::arg("is_root"), py::arg("inputs"))
      .def("post_forward",
           wrap_pybind_function_no_gil([](Fsdp& fsdp, const std::shared_ptr<PyParamGroup>& group,
                                          bool is_root, const std::vector<at::Tensor>& outputs,
                                          bool all_found) {
             fsdp.post_forward(forward_of(group, is_root), outputs, all_found);
           }),
           py::arg("group"), py::arg("is_root"), py::arg("outputs"), py::arg("all_found"))
      .def_property_readonly("is_writing", &Fsdp::is_writing)
      .def("begin_reading", wrap_pybind_function_no_gil(&Fsdp::begin_reading))
      .def("begin_writing", wrap_pybind_function_no_gil(&Fsdp::begin_writing))
      .def("set_synchronize", wrap_pybind_function_no_gil(&Fsdp::set_synchronize),
           py::arg("groups"))
      .def("set_all_reduce", wrap_pybind_function_no_gil(&Fsdp::set_all_reduce), py::arg("groups"))
      .def("set_all_reduce_hooks", &set_python_hooks, py::arg("groups"))
      .def("allocate_from", &allocate_from, py::arg("groups"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_divide_factors", wrap_pybind_function_no_gil(&Fsdp::set_divide_factors),
           py::arg("groups"))
      .def("set_manual_finalization", wrap_pybind_function_no_gil(&Fsdp::set_manual_finalization),
           py::arg("manual"))
      .def("finalize_backward", wrap_pybind_function_no_gil(&Fsdp::finalize_backward))
      .def("reset", wrap_pybind_function_no_gil(&Fsdp::reset))
      .def("set_delivered_callback", &set_delivered_callback, py::arg("callback"))
      .def("take_gradients", wrap_pybind_function_no_gil(&Fsdp::take_gradients),
           py::arg("parameters"))
      .def("wait_for_gradients", wrap_pybind_function_no_gil(&Fsdp::wait_for_gradients))
      .def(
          "set_divisor", [](Fsdp& fsdp, double divisor) { fsdp.reducers().set_divisor(divisor); },
          py::arg("divisor"))
      .def("shadow_step",
           wrap_pybind_function_no_gil([](Fsdp& fsdp, const std::shared_ptr<PyParamGroup>& root) {
             fsdp.shadow_step(root ? root->group : nullptr);
           }),
           py::arg("root"))
      .def("last_step", [](Fsdp& fsdp) {
        StepReport report;
        {
          const py::gil_scoped_release no_gil;
          report = fsdp.reducers().last_step();
        }
        return to_dict(report);
      });
}

}  // namespace trireme

#include <trireme/strategies/fsdp/fsdp.h>

#include <trireme/bindings/bindings.h>
#include <trireme/bindings/shared_function.h>
#include <trireme/bindings/step_report.h>
#include <trireme/comm/group_memory.h>
#include <trireme/strategies/fsdp/unit_hold.h>
#include <trireme/strategies/fsdp/unit_ranks.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace trireme {
namespace {

namespace py = pybind11;
using OptionalDtype = std::optional<at::ScalarType>;

// The place of a parameter in a Python module. The module is held weakly: it owns the group.
struct Place {
  py::weakref module;
  py::str name;
  size_t parameter = 0;
  bool sets_itself = false;  // its class overrides __setattr__, as layers with caches do
};
// All places of a group's parameters. Sharded parameters are held as Python objects only:
// swap_tensors, which Module.to() uses, refuses a tensor that C++ holds.
struct Places final : ModuleFace {
  std::vector<Place> places;
  std::vector<py::object> sharded;
  std::vector<py::object> unsharded;   // held by modules while unsharded
  std::vector<c10::Storage> storages;  // of `sharded`, without values

  // Makes an instance that is dropped under the GIL.
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

  // Returns the DTensor's version: its local tensor's does not count changes of the DTensor.
  uint32_t version(size_t parameter) const override {
    const at::Tensor& tensor = THPVariable_Unpack(sharded[parameter].ptr());
    return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
  }

  // Returns the module's dictionary of parameters; null if the module is gone.
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

  static const c10::Storage& storage_of(const py::object& tensor) {
    return THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl()->unsafe_storage();
  }

  // Returns whether `.data =` has given a sharded parameter the storage of another DTensor. Torch
  // leaves its local tensor, and so its values, as they were.
  bool was_given_data(size_t parameter, const ParamGroup& group) const {
    const py::object local = sharded[parameter].attr("_local_tensor");
    return storages[parameter].unsafeGetStorageImpl() !=
               storage_of(sharded[parameter]).unsafeGetStorageImpl() &&
           THPVariable_Unpack(local.ptr()).unsafeGetTensorImpl() ==
               group.params()[parameter].sharded().unsafeGetTensorImpl();
  }

  // Returns the parameters whose `.data` was assigned so since the last call.
  std::vector<size_t> take_given_data(const ParamGroup& group) {
    std::vector<size_t> given;
    for (size_t i = 0; i < sharded.size(); ++i) {
      if (!was_given_data(i, group)) continue;
      given.push_back(i);
      storages[i] = storage_of(sharded[i]);
    }
    return given;
  }

  // Returns whether modules hold the sharded parameters, and these the group's shards.
  bool are_in_place(const ParamGroup& group) const {
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
          !param.lies_in_store() || was_given_data(i, group))
        return false;
    }
    return true;
  }
};

// A group and the places of its parameters, as Python holds them.
struct PyParamGroup {
  std::shared_ptr<ParamGroup> group;
  std::shared_ptr<Places> places = Places::make();
};

// The parameters of a unit in CPU memory, by index: those whose shard, gradient and optimizer state
// lie there, and those of which the device keeps no copy either.
struct UnitOffload {
  std::vector<size_t> optimizers;
  std::vector<size_t> everything;
  bool pins_memory = true;

  void apply_to(ParamGroupRequest& request) const {
    for (const size_t index : optimizers)
      request.specs.at(index).offload = ShardOffload::kOptimizer;
    for (const size_t index : everything) request.specs.at(index).offload = ShardOffload::kAll;
    request.pins_memory = pins_memory;
  }
};

std::shared_ptr<PyParamGroup> make_group(std::vector<ShardedParamSpec> specs,
                                         std::shared_ptr<Communicator> communicator,
                                         std::shared_ptr<Communicator> gathers_with,
                                         c10::Device device, bool always_gathers,
                                         std::shared_ptr<Communicator> reshards_with,
                                         const std::optional<UnitOffload>& offload) {
  ParamGroupRequest request;
  request.specs = std::move(specs);
  request.communicator = std::move(communicator);
  request.gathers_with = std::move(gathers_with);
  request.device = device;
  request.always_gathers = always_gathers;
  request.reshards_with = std::move(reshards_with);
  if (offload) offload->apply_to(request);
  auto made = std::make_shared<PyParamGroup>();
  made->group = make_param_group(std::move(request));
  return made;
}

Place make_place(const py::object& module, const py::str& name, size_t parameter) {
  const py::object plain = py::module_::import("torch.nn").attr("Module").attr("__setattr__");
  const py::object own = py::type::of(module).attr("__setattr__");
  return {py::weakref(module), name, parameter, !own.is(plain)};
}

void set_places(PyParamGroup& self, std::vector<Place> places,
                const std::vector<py::object>& sharded, std::vector<at::Tensor> leaves,
                const std::vector<py::object>& unsharded) {
  const auto held = Places::make();
  held->places = std::move(places);
  held->sharded = sharded;
  held->unsharded = unsharded;
  for (const py::object& one : sharded) held->storages.push_back(Places::storage_of(one));
  std::vector<at::Tensor> shown;
  for (const py::object& tensor : unsharded) shown.push_back(py::cast<at::Tensor>(tensor));
  self.places = held;
  self.group->set_face(held, std::move(leaves), std::move(shown));
}

Fsdp::Forward forward_of(const std::shared_ptr<PyParamGroup>& group, bool is_root) {
  return {group ? group->group : nullptr, is_root};
}

ShardedParamSpec make_spec(std::string name, std::vector<int64_t> sizes, at::ScalarType dtype,
                           int64_t dim, OptionalDtype param_dtype, OptionalDtype reduce_dtype,
                           bool requires_grad, OptionalDtype grad_dtype) {
  ShardedParamSpec spec{std::move(name), std::move(sizes), dtype,        dim,
                        param_dtype,     reduce_dtype,     requires_grad};
  spec.grad_dtype = grad_dtype;
  return spec;
}

void set_all_reduce_hook(PyParamGroup& self, const std::optional<py::function>& hook) {
  AllReduceHook held;
  if (hook) {
    held = [shared = shared_function(*hook)](at::Tensor& gradients) {
      const py::gil_scoped_acquire gil;
      (*shared)(gradients);
    };
  }
  self.group->flags().all_reduce_hook = std::move(held);
}

void copy_flags(PyParamGroup& self, const PyParamGroup& like) {
  AllReduceHook own = self.group->flags().all_reduce_hook;  // a hook's state belongs to its unit
  self.group->flags() = like.group->flags();
  self.group->flags().all_reduce_hook = std::move(own);
}

// Makes a flag of UnitFlags a property of its groups.
template <auto Flag>
void add_flag(py::class_<PyParamGroup, std::shared_ptr<PyParamGroup>>& group, const char* name) {
  using Value = std::decay_t<decltype(std::declval<UnitFlags>().*Flag)>;
  group.def_property(
      name, [](const PyParamGroup& self) { return self.group->flags().*Flag; },
      [](PyParamGroup& self, Value value) { self.group->flags().*Flag = value; });
}

void init_requests(py::module_& module) {
  py::class_<ShardedParamSpec>(module, "ShardedParamSpec")
      .def(py::init(&make_spec), py::kw_only(), py::arg("name"), py::arg("sizes"), py::arg("dtype"),
           py::arg("dim") = 0, py::arg("param_dtype") = std::nullopt,
           py::arg("reduce_dtype") = std::nullopt, py::arg("requires_grad") = true,
           py::arg("grad_dtype") = std::nullopt);
  py::class_<UnitOffload>(module, "UnitOffload")
      .def(py::init<std::vector<size_t>, std::vector<size_t>, bool>(), py::arg("optimizers"),
           py::arg("everything"), py::arg("pins_memory"))
      .def_readonly("optimizers", &UnitOffload::optimizers)
      .def_readonly("everything", &UnitOffload::everything)
      .def_readonly("pins_memory", &UnitOffload::pins_memory);
  py::class_<Place>(module, "ParamPlace")
      .def(py::init(&make_place), py::arg("module"), py::arg("name"), py::arg("parameter"));
  using Ranks = std::shared_ptr<Communicator>;
  py::class_<FsdpRanks>(module, "FsdpRanks")
      .def(py::init<Ranks, Ranks, Ranks>(), py::arg("communicator"),
           py::arg("replicates_with") = nullptr, py::arg("scatters_with") = nullptr);
}

void init_param_group(py::module_& module) {
  using torch::wrap_pybind_function_no_gil;
  using Group = PyParamGroup;
  py::class_<Group, std::shared_ptr<Group>> group(module, "ParamGroup");
  add_flag<&UnitFlags::reshard_after_forward>(group, "reshard_after_forward");
  add_flag<&UnitFlags::reshard_after_backward>(group, "reshard_after_backward");
  add_flag<&UnitFlags::synchronizes>(group, "synchronizes");
  add_flag<&UnitFlags::all_reduces>(group, "all_reduces");
  add_flag<&UnitFlags::divide_factor>(group, "divide_factor");
  group
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
      .def("deferred_sync",
           [](const Group& self) -> std::shared_ptr<DeferredSync> {
             return std::make_shared<UnitHold>(self.group);
           })
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
          "is_in_place", [](const Group& self) { return self.places->are_in_place(*self.group); })
      .def("take_given_data",
           [](const Group& self) { return self.places->take_given_data(*self.group); })
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
      .def("reshard_to_all", [](Group& self) { self.group->reshard_to_all(); })
      .def("copy_flags", &copy_flags, py::arg("like"))
      .def("set_all_reduce_hook", &set_all_reduce_hook, py::arg("hook"));
}

std::vector<std::shared_ptr<ParamGroup>> groups_of(
    const std::vector<std::shared_ptr<PyParamGroup>>& groups) {
  std::vector<std::shared_ptr<ParamGroup>> held;
  for (const auto& group : groups) held.push_back(group->group);
  return held;
}

std::shared_ptr<Fsdp> make_fsdp(const std::vector<std::shared_ptr<PyParamGroup>>& groups,
                                std::vector<std::string> names, std::vector<FsdpRanks> ranks,
                                std::vector<size_t> ranks_of,
                                std::shared_ptr<Communicator> agrees_with,
                                const std::optional<Compression>& compression) {
  Fsdp::Request request{groups_of(groups), std::move(names), std::move(ranks)};
  request.ranks_of = std::move(ranks_of);
  request.agrees_with = std::move(agrees_with);
  request.compression = compression;
  return Fsdp::make(std::move(request));
}

template <void (Prefetch::*Set)(const ParamGroup&, const std::vector<const ParamGroup*>&)>
void set_prefetch(Fsdp& fsdp, const std::shared_ptr<PyParamGroup>& group,
                  const std::vector<std::shared_ptr<PyParamGroup>>& ahead) {
  std::vector<const ParamGroup*> held;
  for (const auto& later : ahead) held.push_back(later->group.get());
  (fsdp.prefetch().*Set)(*group->group, held);
}

void set_gradient_callback(Fsdp& fsdp, py::function callback) {
  const auto shared = shared_function(std::move(callback));
  const py::gil_scoped_release no_gil;
  fsdp.set_gradient_callback(
      [shared](const std::vector<int64_t>& parameters, const std::vector<at::Tensor>& parts) {
        const py::gil_scoped_acquire gil;
        (*shared)(parameters, parts);
      });
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
  init_requests(module);
  init_param_group(module);
  using torch::wrap_pybind_function_no_gil;
  py::class_<Fsdp, std::shared_ptr<Fsdp>> fsdp(module, "Fsdp");
  init_fsdp_gathers(fsdp);
  fsdp.def(py::init(wrap_pybind_function_no_gil(make_fsdp)), py::kw_only(), py::arg("groups"),
           py::arg("names"), py::arg("ranks"), py::arg("ranks_of"),
           py::arg("agrees_with") = nullptr, py::arg("compression") = std::nullopt)
      .def("kept_codes", [](Fsdp& fsdp) { return fsdp.reducers().kept_codes(); })
      .def("begin_pass", wrap_pybind_function_no_gil(&Fsdp::begin_pass), py::arg("is_root"))
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
      .def("allocate_from", &allocate_from, py::arg("groups"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_manual_finalization", wrap_pybind_function_no_gil(&Fsdp::set_manual_finalization),
           py::arg("manual"))
      .def("finalize_backward", wrap_pybind_function_no_gil(&Fsdp::finalize_backward))
      .def("reset", wrap_pybind_function_no_gil(&Fsdp::reset))
      .def("set_gradient_callback", &set_gradient_callback, py::arg("callback"))
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

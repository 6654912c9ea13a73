#pragma once

#include <torch/csrc/utils/pybind.h>

// One function per area, in the file of that name (init_remote() in remote/endpoint.cpp,
// init_checkpoint() in saving/). Only this folder knows Python.
namespace trireme {

void bind_activation_cache(pybind11::module_& module);  // parts of init_activation()
void bind_partition(pybind11::module_& module);
void bind_channels(pybind11::module_& module);      // a part of init_pipeline()
void bind_global_batch(pybind11::module_& module);  // parts of init_checkpoint()
void bind_pending_save(pybind11::module_& module);
void init_activation(pybind11::module_& module);
void init_autograd(pybind11::module_& module);
void init_checkpoint(pybind11::module_& module);
void init_comm(pybind11::module_& module);
void init_compression(pybind11::module_& module);
void init_data_parallel(pybind11::module_& module);
void init_ddp(pybind11::module_& module);
void init_doctor(pybind11::module_& module);
void init_fsdp(pybind11::module_& module);
void init_grad_norm(pybind11::module_& module);
void init_horovod(pybind11::module_& module);
void init_deferred_sync(pybind11::module_& module);
void init_join(pybind11::module_& module);
void init_launch(pybind11::module_& module);
void init_layer_watch(pybind11::module_& module);
void init_local_sgd(pybind11::module_& module);
void init_memory(pybind11::module_& module);
void init_named_order(pybind11::module_& module);
void init_offload(pybind11::module_& module);
void init_optim(pybind11::module_& module);
void init_parameter_server(pybind11::module_& module);
void init_elastic_plan(pybind11::module_& module);  // a part of init_pipeline()
void init_pipeline(pybind11::module_& module);
void init_pipeline_engine(pybind11::module_& module);
void init_pipetransformer(pybind11::module_& module);
void init_remote(pybind11::module_& module);
void init_sync_batch_norm(pybind11::module_& module);
void init_values(pybind11::module_& module);
void init_zero(pybind11::module_& module);
void init_zero_state(pybind11::module_& module);

}  // namespace trireme

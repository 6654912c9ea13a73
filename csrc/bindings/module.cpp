#include <trireme/bindings/bindings.h>
#include <trireme/common/language.h>

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ core of Trireme. Private: use the package `trireme`.";
  trireme::speak_python();
  trireme::init_autograd(module);
  trireme::init_comm(module);
  trireme::init_activation(module);  // takes communicators of the above
  trireme::init_checkpoint(module);  // takes communicators, too
  trireme::init_data_parallel(module);
  trireme::init_compression(module);
  trireme::init_ddp(module);
  trireme::init_doctor(module);
  trireme::init_deferred_sync(module);
  trireme::init_fsdp(module);     // tells of the above
  trireme::init_horovod(module);  // takes communicators
  trireme::init_launch(module);
  trireme::init_join(module);  // takes communicators
  trireme::init_layer_watch(module);
  trireme::init_local_sgd(module);  // takes communicators and methods of compression
  trireme::init_memory(module);
  trireme::init_named_order(module);  // takes communicators
  trireme::init_offload(module);
  trireme::init_optim(module);
  trireme::init_parameter_server(module);  // takes communicators
  trireme::init_pipeline(module);
  trireme::init_pipeline_engine(module);
  trireme::init_remote(module);  // takes communicators and optimizers
  trireme::init_sync_batch_norm(module);
  trireme::init_values(module);
  trireme::init_zero_state(module);
  trireme::init_zero(module);             // tells of the above
  trireme::init_grad_norm(module);        // takes optimizers of the above
  trireme::init_pipetransformer(module);  // takes what that makes
}

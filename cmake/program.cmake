# trireme_program_headers(): what C++ programs of this tree include, precompiled once for all of them. Half of the
# time that one takes to compile is torch's modules and optimizers. Not in a folder that adds options of its own.
function(trireme_program_headers)
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/generated/program_headers.cpp" CONTENT "")
  add_library(trireme_programs OBJECT EXCLUDE_FROM_ALL
    "${PROJECT_BINARY_DIR}/generated/program_headers.cpp")
  target_link_libraries(trireme_programs PUBLIC trireme)
  target_compile_options(trireme_programs PRIVATE -fPIC)
  set_target_properties(trireme_programs PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_precompile_headers(trireme_programs PRIVATE
    <ATen/ATen.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp> <torch/csrc/autograd/engine.h>
    <torch/nn.h> <torch/optim.h>)
endfunction()

# trireme_link_program(<target>): for C++ examples and benchmarks.
function(trireme_link_program target)
  target_link_libraries(${target} PRIVATE trireme)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM trireme_programs)
endfunction()

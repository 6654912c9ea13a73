# A file that includes torch's headers takes up to 1.5 GiB to compile, many together 2.2; many cores with
# little memory must not compile one each.
set(compile_mib 1500)
if(TRIREME_UNITY)
  set(compile_mib 2200)
endif()
cmake_host_system_information(RESULT available_mib QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR compile_jobs "${available_mib} / ${compile_mib}")
if(compile_jobs LESS 1)
  set(compile_jobs 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS compile=${compile_jobs})
set(CMAKE_JOB_POOL_COMPILE compile)

# A tenth of GCC's time goes into collecting garbage. Where each core has the memory, it may lie. By
# the machine's whole memory: what is free differs from time to time, and other options compile all anew.
cmake_host_system_information(RESULT compile_cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT whole_mib QUERY TOTAL_PHYSICAL_MEMORY)
math(EXPR compile_mib_of_a_core "${whole_mib} / ${compile_cores}")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND compile_mib_of_a_core GREATER 4000)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=2000000;--param=ggc-min-expand=300>")
endif()

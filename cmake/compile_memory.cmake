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

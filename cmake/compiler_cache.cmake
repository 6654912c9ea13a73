# ccache when it is there. The precompiled header needs both settings: without them every file of a
# fresh build tree misses. A folder that was begun without it stays so: another command line would
# compile all of it again.
if(NOT DEFINED CACHE{TRIREME_CCACHE})
  find_program(TRIREME_CCACHE ccache)
endif()
if(TRIREME_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(ccache_sloppiness pch_defines,time_macros,include_file_mtime,include_file_ctime)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    env "CCACHE_SLOPPINESS=${ccache_sloppiness}" "${TRIREME_CCACHE}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
  else()
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  endif()
endif()

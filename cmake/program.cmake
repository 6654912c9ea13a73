# trireme_link_program(<target>): for the C++ tests and examples of this tree. -fPIC, as the library's
# own files have it, or its precompiled header does not fit.
function(trireme_link_program target)
  target_link_libraries(${target} PRIVATE trireme)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM trireme)
endfunction()

# trireme_false_warnings(<target> <file>...), after trireme_unity(<target>): GCC 12 warns in these files that a
# std::string is copied over itself, or that 2^63 bytes are. It is wrong: it inlines `"text" + std::to_string(n)` and
# the like, and looks at a branch that no length takes (GCC bugs 105329 and 105651, mended in 13). Where the files of a
# folder are compiled together, the warnings are off for the group of the file.
function(trireme_false_warnings target)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU" OR NOT CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    return()
  endif()
  foreach(source IN LISTS ARGN)
    get_source_file_property(group "${source}" UNITY_GROUP)
    if(group)
      set(source "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/Unity/unity_${group}_cxx.cxx")
    endif()
    set_property(SOURCE "${source}" PROPERTY
      COMPILE_OPTIONS -Wno-stringop-overflow -Wno-restrict -Wno-array-bounds)
  endforeach()
endfunction()

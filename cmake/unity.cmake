# trireme_unity(<target> [<most>]): with TRIREME_UNITY the files of a folder are compiled together, <most>
# (12) of them at a time. A file with our precompiled header takes 2.4 s before its own first line,
# because GCC instantiates in each what torch's headers have left pending; a folder takes them once.
# For builds of everything, such as the first one and CI's; whoever edits a file wants that one compiled. Names in
# anonymous namespaces are then a folder's, not a file's. Files with options of their own stay alone. A group belongs to
# its files: a second target that compiles some of them, too, groups these as the first one does.
option(TRIREME_UNITY "Compile the files of a folder together, for builds of everything" OFF)

# The more GCC 12 inlines, the more it warns of "literals" that are assigned to a std::string.
if(TRIREME_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-error=stringop-overflow;-Wno-error=restrict;-Wno-error=array-bounds>")
endif()

function(trireme_unity target)
  if(NOT TRIREME_UNITY)
    return()
  endif()
  set(most 12)
  if(ARGC GREATER 1)
    set(most "${ARGV1}")
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  foreach(source IN LISTS sources)
    get_filename_component(folder "${source}" DIRECTORY)
    get_filename_component(folder "${folder}" NAME)
    set(folder "${target}_${folder}")
    list(APPEND folders "${folder}")
    list(APPEND "in_${folder}" "${source}")
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    # As few groups as that takes, of about one length.
    list(LENGTH "in_${folder}" count)
    math(EXPR groups "(${count} + ${most} - 1) / ${most}")
    set(number 0)
    foreach(source IN LISTS "in_${folder}")
      math(EXPR group "${number} * ${groups} / ${count}")
      get_source_file_property(grouped "${source}" UNITY_GROUP)
      if(NOT grouped)
        set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${folder}_${group}")
      endif()
      math(EXPR number "${number} + 1")
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

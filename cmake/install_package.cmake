# Two components. `core` is what a C++ user needs and what a plain `cmake --install` copies; setup.py
# puts the same tree inside the Python package. `python` is the compiled module, installed by
# setup.py only.
include(CMakePackageConfigHelpers)
set(config_dir lib/cmake/Trireme)

install(TARGETS trireme EXPORT TriremeTargets
  LIBRARY DESTINATION lib COMPONENT core
  INCLUDES DESTINATION include)
install(EXPORT TriremeTargets NAMESPACE Trireme:: DESTINATION ${config_dir} COMPONENT core)
foreach(opened IN ITEMS trireme_cuda trireme_nccl) # at run time, so nothing links them
  if(TARGET ${opened})
    install(TARGETS ${opened} LIBRARY DESTINATION lib COMPONENT core)
    if(TRIREME_PYTHON)
      add_dependencies(_C ${opened})
    endif()
  endif()
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/csrc/" DESTINATION include/trireme COMPONENT core
  FILES_MATCHING PATTERN "*.h"
  PATTERN bindings EXCLUDE PATTERN gloo_shim EXCLUDE PATTERN cpu EXCLUDE PATTERN cuda EXCLUDE)
install(FILES "${PROJECT_BINARY_DIR}/generated/trireme/common/version.h"
  DESTINATION include/trireme/common COMPONENT core)

configure_file("${PROJECT_SOURCE_DIR}/cmake/TriremeConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/TriremeConfig.cmake" @ONLY)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(
  FILES
    "${PROJECT_BINARY_DIR}/TriremeConfig.cmake"
    "${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/TriremeTorch.cmake"
  DESTINATION ${config_dir} COMPONENT core)

if(TRIREME_PYTHON)
  install(TARGETS _C LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES "${TRIREME_STAGE}/_build_info.py"
    DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
endif()

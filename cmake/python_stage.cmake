# <build>/python/trireme: links to the Python sources beside the built module, so that several build
# trees (one per torch) serve one checkout and nothing built lies in the source folder.
file(GLOB python_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/python/trireme/*.py"
  "${PROJECT_SOURCE_DIR}/python/trireme/*.pyi"
  "${PROJECT_SOURCE_DIR}/python/trireme/py.typed")
# An editable installation leaves its own there.
list(FILTER python_sources EXCLUDE REGEX "/_build_info\\.py$")

file(GLOB stale "${TRIREME_STAGE}/*.py" "${TRIREME_STAGE}/*.pyi")
if(stale)
  file(REMOVE ${stale})
endif()
file(MAKE_DIRECTORY "${TRIREME_STAGE}")
foreach(source IN LISTS python_sources)
  get_filename_component(name "${source}" NAME)
  file(CREATE_LINK "${source}" "${TRIREME_STAGE}/${name}" SYMBOLIC)
endforeach()
configure_file(
  "${PROJECT_SOURCE_DIR}/cmake/build_info.py.in" "${TRIREME_STAGE}/_build_info.py" @ONLY)

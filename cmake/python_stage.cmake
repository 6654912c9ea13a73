# <build>/python/trireme: links to the Python sources beside the built module, so that several build
# trees (one per torch) serve one checkout and nothing built lies in the source folder.
set(python_folder "${PROJECT_SOURCE_DIR}/python/trireme")
file(GLOB_RECURSE python_sources CONFIGURE_DEPENDS RELATIVE "${python_folder}"
  "${python_folder}/*.py"
  "${python_folder}/*.pyi"
  "${python_folder}/py.typed")
# An editable installation leaves its own there.
list(FILTER python_sources EXCLUDE REGEX "^_build_info\\.py$")

file(GLOB_RECURSE stale "${TRIREME_STAGE}/*.py" "${TRIREME_STAGE}/*.pyi")
if(stale)
  file(REMOVE ${stale})
endif()
foreach(source IN LISTS python_sources)
  get_filename_component(room "${TRIREME_STAGE}/${source}" DIRECTORY)
  file(MAKE_DIRECTORY "${room}")
  file(CREATE_LINK "${python_folder}/${source}" "${TRIREME_STAGE}/${source}" SYMBOLIC)
endforeach()
configure_file(
  "${PROJECT_SOURCE_DIR}/cmake/build_info.py.in" "${TRIREME_STAGE}/_build_info.py" @ONLY)

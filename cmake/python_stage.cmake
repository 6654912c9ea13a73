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
# By this importlib finds the version, and torch the backend without an import, as in an installation.
set(stage_metadata "${PROJECT_BINARY_DIR}/python/trireme-${PROJECT_VERSION}.dist-info")
file(WRITE "${stage_metadata}/METADATA"
  "Metadata-Version: 2.1\nName: trireme\nVersion: ${PROJECT_VERSION}\n")
file(WRITE "${stage_metadata}/entry_points.txt"
  "[torch.distributed.backends]\ntrireme = trireme._launch.shm_backend:register\n")
configure_file(
  "${PROJECT_SOURCE_DIR}/cmake/build_info.py.in" "${TRIREME_STAGE}/_build_info.py" @ONLY)

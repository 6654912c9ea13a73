# xxHash, for the checksums of checkpoints: the system's header (libxxhash-dev) if it has XXH3, else the
# one in third_party/, since no package of PyPI brings it. Sets TRIREME_XXHASH_DIR.
set(TRIREME_XXHASH_DIR "${PROJECT_SOURCE_DIR}/third_party/xxhash")
find_path(TRIREME_SYSTEM_XXHASH_DIR xxhash.h)
if(TRIREME_SYSTEM_XXHASH_DIR)
  file(STRINGS "${TRIREME_SYSTEM_XXHASH_DIR}/xxhash.h" version_line
    REGEX "^#define XXH_VERSION_MINOR +[0-9]+")
  string(REGEX MATCH "[0-9]+" version "${version_line}")
  if(version AND NOT version LESS 8)  # since 0.8 the values of XXH3 stay
    set(TRIREME_XXHASH_DIR "${TRIREME_SYSTEM_XXHASH_DIR}")
  endif()
endif()

# nlohmann/json, for the headers and indexes of checkpoints: from the environment that builds
# (scripts/build_tools.txt), or the system's. Sets TRIREME_JSON_DIR.
set(found "")
if(Python3_EXECUTABLE)
  string(CONCAT question
    "import importlib.util as u, os; s = u.find_spec('nlohmann_json'); "
    "print(os.path.join(os.path.dirname(s.origin), 'include') if s else '')")
  execute_process(COMMAND "${Python3_EXECUTABLE}" -c "${question}"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(TRIREME_JSON_DIR nlohmann/json.hpp HINTS "${found}")
if(NOT TRIREME_JSON_DIR)
  message(FATAL_ERROR
    "[trireme] no nlohmann/json.hpp found. Run: pip install nlohmann-json, or install the "
    "system's package (nlohmann-json3-dev), or say where it lies: -DTRIREME_JSON_DIR=<folder>.")
endif()

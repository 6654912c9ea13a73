# Finds the torch of a Python environment and makes the target Trireme::torch of it. Used by our
# build and, installed next to TriremeConfig.cmake, by those who link us. It neither imports torch
# (seconds) nor calls find_package(Torch), which fails where the wheel was built with CUDA and the
# machine has no CUDA toolkit, and which sets CUDA flags for everybody.

# trireme_find_torch(<out> <python>): the folder that holds include/ and lib/. -DTorch_ROOT wins
# over the interpreter.
function(trireme_find_torch out python)
  if(Torch_ROOT)
    set(${out} "${Torch_ROOT}" PARENT_SCOPE)
    return()
  endif()
  set(found "")
  if(python)
    string(CONCAT question
      "import importlib.util as u, os; s = u.find_spec('torch'); "
      "print(os.path.dirname(s.origin) if s else '')")
    execute_process(COMMAND "${python}" -c "${question}"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# trireme_import_torch(<dir>): defines Trireme::torch (headers are SYSTEM, libraries torch_cpu and
# c10) and sets TRIREME_TORCH_DIR, TRIREME_TORCH_VERSION and TRIREME_TORCH_MINOR (such as 2.15) for
# the caller.
function(trireme_import_torch dir)
  set(version_header "${dir}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${version_header}")
    message(FATAL_ERROR
      "[trireme] no torch found (looked in '${dir}'). Install torch >= 2.11 into the environment "
      "of the interpreter that CMake is given (-DPython3_EXECUTABLE=... to build Trireme, "
      "-DTrireme_PYTHON=... to use it), or say where it lies: -DTorch_ROOT=<site-packages>/torch.")
  endif()
  foreach(part MAJOR MINOR PATCH)
    file(STRINGS "${version_header}" line REGEX "define TORCH_VERSION_${part} ")
    string(REGEX MATCH "[0-9]+" ${part} "${line}")
  endforeach()

  if(NOT TARGET Trireme::torch)
    add_library(Trireme::torch INTERFACE IMPORTED GLOBAL)
    target_include_directories(Trireme::torch SYSTEM INTERFACE
      "${dir}/include" "${dir}/include/torch/csrc/api/include")
    target_compile_features(Trireme::torch INTERFACE cxx_std_20)
    target_link_libraries(Trireme::torch INTERFACE
      "${dir}/lib/libtorch_cpu.so" "${dir}/lib/libc10.so")
    # A program finds torch through its own run path and libtrireme then finds it loaded. A linker
    # that drops what the program itself does not call would take that away.
    target_link_options(Trireme::torch INTERFACE LINKER:--no-as-needed)
  endif()
  set(TRIREME_TORCH_DIR "${dir}" PARENT_SCOPE)
  set(TRIREME_TORCH_VERSION "${MAJOR}.${MINOR}.${PATCH}" PARENT_SCOPE)
  set(TRIREME_TORCH_MINOR "${MAJOR}.${MINOR}" PARENT_SCOPE)
endfunction()

# trireme_link_torch_cuda(<out> <dir>): Trireme::torch brings libtorch_cuda, too, with which at::hasCUDA()
# sees the GPUs. <out> is FALSE where that torch has none.
function(trireme_link_torch_cuda out dir)
  set(${out} FALSE PARENT_SCOPE)
  if(EXISTS "${dir}/lib/libtorch_cuda.so")
    target_link_libraries(Trireme::torch INTERFACE
      "${dir}/lib/libtorch_cuda.so" "${dir}/lib/libc10_cuda.so")
    # What these need is found by their own run paths when the program starts, not by the linker.
    target_link_options(Trireme::torch INTERFACE LINKER:--allow-shlib-undefined)
    set(${out} TRUE PARENT_SCOPE)
  endif()
endfunction()

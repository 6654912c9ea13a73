# Decides TRIREME_WITH_CUDA: are the .cu files compiled (two minutes of nvcc)? Without them there is no
# libtrireme_cuda, and torch's operators stand in. nvcc must be of torch's CUDA major version, because
# both share one CUDA runtime in the process. AUTO asks for a GPU, too: whoever builds for other
# machines says ON. TRIREME_FLAVOUR is what the version of a wheel says of it: cu132, or cpu.
set(TRIREME_WITH_CUDA OFF)
set(TRIREME_CUDA_MAJOR "")
set(TRIREME_FLAVOUR cpu)
if(TRIREME_CUDA STREQUAL "OFF")
  return()
endif()

file(STRINGS "${TRIREME_TORCH_DIR}/version.py" torch_cuda REGEX "^cuda.*=")
string(REGEX MATCH "'([0-9]+)\\.([0-9]+)" _ "${torch_cuda}")
set(torch_cuda_major "${CMAKE_MATCH_1}")
set(torch_cuda_minor "${CMAKE_MATCH_2}")

if(TRIREME_CUDA STREQUAL "AUTO")
  find_program(TRIREME_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(TRIREME_NVIDIA_SMI)
  if(NOT TRIREME_NVIDIA_SMI AND NOT EXISTS /dev/nvidia0)
    message(STATUS "CUDA kernels left out: there is no GPU here (TRIREME_CUDA=ON compiles them)")
    return()
  endif()
endif()

set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
# Turing and newer, as torch has. Code for 80 also runs on 86 and 89; newer generations take the PTX of
# 90, which the driver compiles at its first use. Where nothing fits Trireme says so and goes on
# without its kernels. Each takes nvcc half a minute; the variable CUDAARCHS names others.
# CMake itself reads it in the first configuration of a folder only.
if(DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES "$ENV{CUDAARCHS}")
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "75-real;80-real;90")
endif()
if(torch_cuda_major)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    string(REGEX MATCH "^[0-9]+" TRIREME_CUDA_MAJOR "${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
endif()

if(TRIREME_CUDA_MAJOR AND TRIREME_CUDA_MAJOR STREQUAL torch_cuda_major)
  set(TRIREME_WITH_CUDA ON)
  set(TRIREME_FLAVOUR "cu${torch_cuda_major}${torch_cuda_minor}")
  # CMake < 3.26 knows no CUDA20 for nvcc, and kernels without torch's headers do not need it.
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
elseif(TRIREME_CUDA STREQUAL "ON")
  message(FATAL_ERROR
    "[trireme] TRIREME_CUDA=ON, but nvcc is of CUDA '${TRIREME_CUDA_MAJOR}' and torch of CUDA "
    "'${torch_cuda_major}'. Install a CUDA toolkit of torch's major version, or leave "
    "TRIREME_CUDA at AUTO.")
elseif(TRIREME_CUDA_MAJOR)
  message(STATUS
    "CUDA kernels left out: nvcc is of CUDA ${TRIREME_CUDA_MAJOR}, "
    "torch of CUDA ${torch_cuda_major}")
endif()

# Chooses nvcc: the machine's CUDA toolkit, else the compiler of the PyPI wheels in the Python in use.

set(FP4GEMM_CUDA_FROM "auto" CACHE STRING "Where nvcc comes from: auto (system, else wheel), system, wheel")
set_property(CACHE FP4GEMM_CUDA_FROM PROPERTY STRINGS auto system wheel)

# Version of one nvcc ("13.0") -> out_var; empty where it does not run.
function(fp4gemm_nvcc_version nvcc out_var)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE rc)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${text}")
  set(${out_var} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# Every nvcc that FP4GEMM_CUDA_FROM allows, in order of preference -> out_var.
function(fp4gemm_nvcc_candidates out_var)
  set(candidates "")
  if(FP4GEMM_CUDA_FROM MATCHES "^(auto|system)$")
    find_program(on_path nvcc NO_CACHE)
    foreach(nvcc "$ENV{CUDACXX}" "$ENV{CUDA_HOME}/bin/nvcc" "$ENV{CUDA_PATH}/bin/nvcc" "${on_path}" /usr/local/cuda/bin/nvcc)
      if(EXISTS "${nvcc}")
        list(APPEND candidates "${nvcc}")
      endif()
    endforeach()
  endif()
  if(FP4GEMM_CUDA_FROM MATCHES "^(auto|wheel)$" AND Python3_EXECUTABLE)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "from importlib.util import find_spec as f; s = f('nvidia'); print(*(s.submodule_search_locations if s else ()), sep='\\n')"
      OUTPUT_VARIABLE roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(REPLACE "\n" ";" roots "${roots}")
    foreach(root IN LISTS roots)
      file(GLOB wheels "${root}/cu*/bin/nvcc") # nvidia/cu13/bin/nvcc
      list(APPEND candidates ${wheels})
    endforeach()
  endif()
  list(REMOVE_DUPLICATES candidates)
  set(${out_var} "${candidates}" PARENT_SCOPE)
endfunction()

# The first candidate that can build FP4GEMM_ARCHS -> out_nvcc (empty: none), and a list of all that were seen -> out_seen.
function(fp4gemm_find_nvcc out_nvcc out_seen)
  if(NOT FP4GEMM_CUDA_FROM MATCHES "^(auto|system|wheel)$")
    message(FATAL_ERROR "FP4GEMM_CUDA_FROM: is ${FP4GEMM_CUDA_FROM}, must be auto, system or wheel")
  endif()
  fp4gemm_nvcc_candidates(candidates)
  if(CMAKE_CUDA_COMPILER) # the caller's choice, or that of the last configuration
    set(candidates "${CMAKE_CUDA_COMPILER}")
  endif()
  set(chosen "")
  set(seen "")
  foreach(nvcc IN LISTS candidates)
    fp4gemm_nvcc_version("${nvcc}" version)
    string(APPEND seen "\n  ${nvcc}: ${version}")
    if(version VERSION_GREATER_EQUAL FP4GEMM_NVCC_MIN AND NOT chosen)
      set(chosen "${nvcc}")
    endif()
  endforeach()
  set(${out_nvcc} "${chosen}" PARENT_SCOPE)
  set(${out_seen} "${seen}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_COMPILER; call it before enable_language(CUDA).
macro(fp4gemm_choose_nvcc)
  if(DEFINED FP4GEMM_CUDA_FROM_CONFIGURED AND NOT FP4GEMM_CUDA_FROM STREQUAL FP4GEMM_CUDA_FROM_CONFIGURED)
    message(FATAL_ERROR "FP4GEMM_CUDA_FROM: is ${FP4GEMM_CUDA_FROM}, but this build folder was configured with "
                        "${FP4GEMM_CUDA_FROM_CONFIGURED} and cannot change its compiler; use another folder, or cmake --fresh.")
  endif()
  fp4gemm_find_nvcc(_nvcc _seen)
  if(NOT _nvcc)
    if(NOT _seen)
      set(_seen " none")
    endif()
    message(FATAL_ERROR
      "No nvcc >= ${FP4GEMM_NVCC_MIN}, which FP4GEMM_CUDA_ARCHS=${FP4GEMM_CUDA_ARCHS} needs (${FP4GEMM_NVCC_MIN_FOR}), was found "
      "(FP4GEMM_CUDA_FROM=${FP4GEMM_CUDA_FROM}). Found:${_seen}\n"
      "Install a CUDA toolkit and set CUDACXX, or install the compiler's wheels into the Python in use "
      "(${Python3_EXECUTABLE} -m pip install -r requirements/cuda.txt), or build without kernels (-DFP4GEMM_CUDA_ARCHS=none).")
  endif()
  set(FP4GEMM_CUDA_FROM_CONFIGURED "${FP4GEMM_CUDA_FROM}" CACHE INTERNAL "FP4GEMM_CUDA_FROM that chose CMAKE_CUDA_COMPILER")
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${_nvcc}" CACHE FILEPATH "nvcc" FORCE)
  endif()
  # The wheels keep libcudart_static.a in lib, where their nvcc does not look (it looks in lib64).
  get_filename_component(_bin "${_nvcc}" DIRECTORY)
  if(NOT IS_DIRECTORY "${_bin}/../lib64" AND EXISTS "${_bin}/../lib/libcudart_static.a")
    get_filename_component(_lib "${_bin}/../lib" ABSOLUTE)
    string(APPEND CMAKE_CUDA_FLAGS " -L${_lib}")
  endif()
endmacro()

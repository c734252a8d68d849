# Finds the CUTLASS headers: -DCUTLASS_DIR=<checkout>, else the nvidia-cutlass wheel of the Python in use.
#
# Used by our own build and, installed beside the package config, by users of fp4gemm::cutlass_evt.

set(FP4GEMM_CUTLASS_MIN 4.2.0)
set(CUTLASS_DIR "" CACHE PATH "A CUTLASS checkout; empty: the nvidia-cutlass wheel of the Python in use")

# Sets FP4GEMM_CUTLASS_INCLUDES and FP4GEMM_CUTLASS_VERSION, or FP4GEMM_CUTLASS_PROBLEM: a sentence saying what to do.
function(fp4gemm_find_cutlass)
  set(problem "")
  set(version "")
  set(root "${CUTLASS_DIR}")
  if(root)
    set(from "CUTLASS_DIR (${CUTLASS_DIR})")
  else()
    set(from "the nvidia-cutlass wheel")
    if(NOT Python3_EXECUTABLE)
      find_package(Python3 QUIET COMPONENTS Interpreter)
    endif()
    if(Python3_EXECUTABLE)
      execute_process(
        COMMAND "${Python3_EXECUTABLE}" -c
                "from importlib.util import find_spec as f; s = f('cutlass_library'); s and print(s.submodule_search_locations[0])"
        OUTPUT_VARIABLE package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
      if(package)
        set(root "${package}/source")
      endif()
    endif()
  endif()

  set(header "${root}/include/cutlass/version.h")
  if(NOT root)
    set(problem "CUTLASS was not found. Install its headers (pip install --no-deps nvidia-cutlass==4.2.0.0) into the \
Python in use (${Python3_EXECUTABLE}), or pass -DCUTLASS_DIR=<a checkout of CUTLASS >= ${FP4GEMM_CUTLASS_MIN}>.")
  elseif(NOT EXISTS "${header}")
    set(problem "${from} has no include/cutlass/version.h, must be a checkout of CUTLASS >= ${FP4GEMM_CUTLASS_MIN}.")
  else()
    file(STRINGS "${header}" lines REGEX "^#define CUTLASS_(MAJOR|MINOR|PATCH) ")
    set(parts "")
    foreach(part MAJOR MINOR PATCH)
      string(REGEX MATCH "CUTLASS_${part} +([0-9]+)" _ "${lines}")
      list(APPEND parts "${CMAKE_MATCH_1}")
    endforeach()
    list(JOIN parts "." version)
    if(version VERSION_LESS FP4GEMM_CUTLASS_MIN)
      set(problem "CUTLASS of ${from} is ${version}, must be at least ${FP4GEMM_CUTLASS_MIN}.")
    endif()
  endif()

  set(FP4GEMM_CUTLASS_PROBLEM "${problem}" PARENT_SCOPE)
  set(FP4GEMM_CUTLASS_VERSION "${version}" PARENT_SCOPE)
  set(FP4GEMM_CUTLASS_INCLUDES "${root}/include;${root}/tools/util/include" PARENT_SCOPE)
endfunction()

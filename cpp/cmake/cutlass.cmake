# Finds the CUTLASS headers: those of CUTLASS_DIR, else the newest that the Python in use has.
#
# Used by our own build and, installed beside the package config, by users of fp4gemm::cutlass_evt.

set(FP4GEMM_CUTLASS_MIN 4.2.0)
set(CUTLASS_DIR "$ENV{CUTLASS_DIR}" CACHE PATH "A CUTLASS checkout; empty: the newest headers that the Python in use has")

# Sets out_var to the folders of the Python in use that have a CUTLASS: the one that unpack_cutlass.py makes, and those in the
# wheels flashinfer-python and nvidia-cutlass, whose modules are not imported.
function(fp4gemm_cutlass_of_python out_var)
  set(roots "")
  if(Python3_EXECUTABLE)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "import sys; from importlib.util import find_spec as f; print(sys.prefix + '/share/fp4gemm/cutlass'); \
[print(f(m).submodule_search_locations[0] + p) for m, p in \
(('flashinfer', '/data/cutlass'), ('cutlass_library', '/source')) if f(m)]"
      OUTPUT_VARIABLE candidates OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(REPLACE "\n" ";" candidates "${candidates}")
    foreach(candidate IN LISTS candidates)
      if(EXISTS "${candidate}/include/cutlass/version.h")
        list(APPEND roots "${candidate}")
      endif()
    endforeach()
  endif()
  set(${out_var} "${roots}" PARENT_SCOPE)
endfunction()

# Sets out_var to the version of the CUTLASS in a folder that has an include/cutlass/version.h: "4.5.0".
function(fp4gemm_cutlass_version root out_var)
  file(STRINGS "${root}/include/cutlass/version.h" lines REGEX "^#define CUTLASS_(MAJOR|MINOR|PATCH) ")
  set(parts "")
  foreach(part MAJOR MINOR PATCH)
    string(REGEX MATCH "CUTLASS_${part} +([0-9]+)" _ "${lines}")
    list(APPEND parts "${CMAKE_MATCH_1}")
  endforeach()
  list(JOIN parts "." version)
  set(${out_var} "${version}" PARENT_SCOPE)
endfunction()

# Sets FP4GEMM_CUTLASS_INCLUDES and FP4GEMM_CUTLASS_VERSION, or FP4GEMM_CUTLASS_PROBLEM: a sentence saying what to do.
function(fp4gemm_find_cutlass)
  set(problem "")
  set(root "")
  set(version 0)
  if(CUTLASS_DIR)
    set(root "${CUTLASS_DIR}")
    if(NOT IS_ABSOLUTE "${root}") # from the environment: CMake completes what -D sets
      set(problem "CUTLASS_DIR is ${root}, must be an absolute path.")
    elseif(NOT EXISTS "${root}/include/cutlass/version.h")
      set(problem "CUTLASS_DIR (${root}) has no include/cutlass/version.h, must be a checkout of CUTLASS >= \
${FP4GEMM_CUTLASS_MIN}.")
    else()
      fp4gemm_cutlass_version("${root}" version)
    endif()
  else()
    if(NOT Python3_EXECUTABLE)
      find_package(Python3 QUIET COMPONENTS Interpreter)
    endif()
    set(python "${Python3_EXECUTABLE}")
    if(NOT python)
      set(python "none was found")
    endif()
    fp4gemm_cutlass_of_python(candidates)
    foreach(candidate IN LISTS candidates)
      fp4gemm_cutlass_version("${candidate}" found)
      if(found VERSION_GREATER version)
        set(root "${candidate}")
        set(version "${found}")
      endif()
    endforeach()
    if(NOT root)
      set(problem "CUTLASS was not found. Pass -DCUTLASS_DIR=<a checkout of CUTLASS >= ${FP4GEMM_CUTLASS_MIN}>, or give the \
Python in use (${python}) its headers: by python cpp/cmake/unpack_cutlass.py in a checkout of fp4gemm, or by \
pip install --no-deps nvidia-cutlass==4.2.0.0.")
    endif()
  endif()
  if(NOT problem AND version VERSION_LESS FP4GEMM_CUTLASS_MIN)
    set(problem "CUTLASS of ${root} is ${version}, must be at least ${FP4GEMM_CUTLASS_MIN}.")
  endif()
  set(FP4GEMM_CUTLASS_PROBLEM "${problem}" PARENT_SCOPE)
  set(FP4GEMM_CUTLASS_VERSION "${version}" PARENT_SCOPE)
  set(FP4GEMM_CUTLASS_INCLUDES "${root}/include;${root}/tools/util/include" PARENT_SCOPE)
endfunction()

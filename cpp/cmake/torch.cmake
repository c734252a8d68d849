# Finds the torch of the Python in use and builds a library of ops against its stable ABI.

set(FP4GEMM_TORCH_MIN 2.11)
set(FP4GEMM_TORCH_TARGET_VERSION 0x020b000000000000) # the oldest torch that may load the ops: 2.11

# Sets FP4GEMM_TORCH_ROOT and FP4GEMM_TORCH_VERSION, or FP4GEMM_TORCH_PROBLEM: a sentence saying what to do.
function(fp4gemm_find_torch)
  set(problem "")
  set(version "")
  set(root "${FP4GEMM_TORCH_DIR}") # that of another processor: aarch64.cmake
  if(Python3_EXECUTABLE AND NOT root)
    # Importing torch would need seconds; its path and version are enough.
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -c
              "from importlib.util import find_spec as f; s = f('torch'); s and print(s.submodule_search_locations[0])"
      OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT root)
    set(problem "torch was not found in the Python in use (${Python3_EXECUTABLE}). Install torch >= ${FP4GEMM_TORCH_MIN} there \
and build in that environment (pip install --no-build-isolation), or pass -DFP4GEMM_BUILD_TORCH=OFF.")
  else()
    file(STRINGS "${root}/version.py" line REGEX "^__version__")
    string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${line}")
    if(version VERSION_LESS FP4GEMM_TORCH_MIN)
      set(problem "torch in ${root} is ${version}, must be at least ${FP4GEMM_TORCH_MIN}.")
    endif()
  endif()
  set(FP4GEMM_TORCH_PROBLEM "${problem}" PARENT_SCOPE)
  set(FP4GEMM_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(FP4GEMM_TORCH_ROOT "${root}" PARENT_SCOPE)
endfunction()

# A library that torch.ops.load_library loads; it finds libfp4gemm.so beside itself.
function(fp4gemm_add_torch_ops name)
  add_library(${name} MODULE ${ARGN})
  target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..") # cutlass_evt, without CUTLASS
  target_include_directories(${name} SYSTEM PRIVATE "${FP4GEMM_TORCH_ROOT}/include")
  target_compile_definitions(${name} PRIVATE TORCH_TARGET_VERSION=${FP4GEMM_TORCH_TARGET_VERSION})
  if(FP4GEMM_ARCHS)
    # USE_CUDA makes torch's headers declare the current-stream function.
    target_compile_definitions(${name} PRIVATE USE_CUDA)
    target_include_directories(${name} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  endif()
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  target_link_libraries(${name} PRIVATE fp4gemm)
  # --no-as-needed: the linker would drop libtorch.so, since no symbol of it is used. --allow-shlib-undefined: libraries
  # that torch's own libraries need (CUDA) may be absent on the machine that builds.
  target_link_libraries(${name} PRIVATE -Wl,--no-as-needed "${FP4GEMM_TORCH_ROOT}/lib/libtorch.so"
                                        "${FP4GEMM_TORCH_ROOT}/lib/libtorch_cpu.so" -Wl,--as-needed)
  target_link_options(${name} PRIVATE LINKER:--exclude-libs,ALL LINKER:--allow-shlib-undefined)
  set_target_properties(${name} PROPERTIES INSTALL_RPATH "$ORIGIN" BUILD_RPATH_USE_ORIGIN OFF)
endfunction()

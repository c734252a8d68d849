# Prints the nvcc that would build FP4GEMM_CUDA_ARCHS, or "missing", or "unneeded"; before anything is configured.
#
#   cmake -DPython3_EXECUTABLE=... -DFP4GEMM_CUDA_ARCHS=... -P cpp/cmake/find_nvcc.cmake
cmake_minimum_required(VERSION 3.24)
include("${CMAKE_CURRENT_LIST_DIR}/archs.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/cuda.cmake")

if(NOT FP4GEMM_CUDA_ARCHS)
  set(FP4GEMM_CUDA_ARCHS all)
endif()
fp4gemm_read_archs()
fp4gemm_find_nvcc(nvcc seen)
if(NOT FP4GEMM_ARCHS)
  set(nvcc unneeded)
elseif(NOT nvcc)
  set(nvcc missing)
endif()
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${nvcc}")

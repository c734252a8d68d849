# Prints the folder of CUTLASS's headers that a build would use. Without one it fails, and says what to do.
#
#   cmake -DPython3_EXECUTABLE=... -P cpp/cmake/find_cutlass.cmake
cmake_minimum_required(VERSION 3.24)
include("${CMAKE_CURRENT_LIST_DIR}/cutlass.cmake")

fp4gemm_find_cutlass()
if(FP4GEMM_CUTLASS_PROBLEM)
  message(FATAL_ERROR "${FP4GEMM_CUTLASS_PROBLEM}")
endif()
list(GET FP4GEMM_CUTLASS_INCLUDES 0 _include)
execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${_include}")

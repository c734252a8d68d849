# The toolchain by which an x86-64 machine builds fp4gemm for 64-bit Arm (GB200, DGX Spark): `make wheel-aarch64`.
#
#   cmake -DCMAKE_TOOLCHAIN_FILE=cpp/cmake/aarch64.cmake ...
#
# It needs the compiler of Debian's and Ubuntu's package g++-aarch64-linux-gnu, and a folder with the unpacked wheels of
# requirements/aarch64.txt, which the environment variable FP4GEMM_AARCH64_WHEELS names: torch, which the operators are
# linked to, and CUDA's runtime library and headers. nvcc is that of the x86-64 machine.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(_wheels "$ENV{FP4GEMM_AARCH64_WHEELS}")
if(NOT IS_DIRECTORY "${_wheels}/torch")
  message(FATAL_ERROR "FP4GEMM_AARCH64_WHEELS: is \"${_wheels}\", must be a folder with the wheels of requirements/aarch64.txt")
endif()
set(FP4GEMM_TORCH_DIR "${_wheels}/torch" CACHE PATH "The folder of a torch that the Python in use does not have")

foreach(_language C CXX)
  set(_suffix g++)
  if(_language STREQUAL C)
    set(_suffix gcc)
  endif()
  find_program(CMAKE_${_language}_COMPILER aarch64-linux-gnu-${_suffix} REQUIRED)
endforeach()
set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
# nvcc and CMake look for the headers and libraries of another processor in a folder of the toolkit, which may lack them.
set(_cuda "${_wheels}/nvidia/cu13")
set(_includes "-isystem ${_cuda}/include -isystem ${_cuda}/include/cccl")
set(CMAKE_CXX_FLAGS_INIT "${_includes}")
set(CMAKE_CUDA_FLAGS_INIT "${_includes} -L${_cuda}/lib")

# The table of GPU architectures: what each family builds, which nvcc it needs and which devices it serves.
#
# A family is what FP4GEMM_CUDA_ARCHS lists. To add one: a row here, a folder cpp/src/smNN with an arch.cpp and its *.cu, and
# for kernels of CUTLASS a header cpp/cutlass_evt/arch/smNN.hpp. Families may share a folder: its sources are then compiled
# for each of them. The library learns the compute capabilities of the devices from this table.
#
#   family   GEMM folder   nvcc    code of quantize and decode           compute capabilities
#            (- : none)    (>=)    (NN: machine code, NN-ptx: portable,  that it serves
#                                  NNf: machine code and PTX)
#
# The host code needs CUDA 12.5 (cudaGetDriverEntryPointByVersion), so that no row can name an older nvcc.
set(FP4GEMM_ARCH_TABLE
    "80    |  -            | 12.5  | 80                                | 8.0 8.6 8.7 8.8 8.9"
    "90a   |  sm90         | 12.5  | 90 90-ptx                         | 9.0"
    "100f  |  sm100        | 12.9  | 100f                              | 10.0 10.3"
    "120f  |  sm120        | 12.9  | 120f                              | 12.0 12.1")

# Sets out_var to every family of the table.
function(fp4gemm_all_archs out_var)
  set(families "")
  foreach(row IN LISTS FP4GEMM_ARCH_TABLE)
    string(REGEX REPLACE " *\\|.*" "" family "${row}")
    list(APPEND families "${family}")
  endforeach()
  set(${out_var} "${families}" PARENT_SCOPE)
endfunction()

# Sets out_var to the families of the GPUs in this machine; empty if the table has none for them.
function(fp4gemm_native_archs out_var)
  set(families "")
  execute_process(COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/detect_gpu.py"
                  OUTPUT_VARIABLE capabilities OUTPUT_STRIP_TRAILING_WHITESPACE)
  separate_arguments(capabilities)
  foreach(capability IN LISTS capabilities)
    set(found "")
    foreach(row IN LISTS FP4GEMM_ARCH_TABLE)
      string(REGEX REPLACE " *\\| *" ";" row "${row}")
      list(GET row 4 mapped)
      separate_arguments(mapped)
      if(capability IN_LIST mapped)
        list(GET row 0 found)
      endif()
    endforeach()
    if(found)
      list(APPEND families "${found}")
    else()
      message(WARNING "fp4gemm: no kernels exist for this machine's GPU of compute capability ${capability}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES families)
  set(${out_var} "${families}" PARENT_SCOPE)
endfunction()

# Reads FP4GEMM_CUDA_ARCHS and sets
#   FP4GEMM_ARCHS             its families, `all` and `native` resolved; empty for "none"
#   FP4GEMM_NVCC_MIN          the oldest nvcc that can build them all, and FP4GEMM_NVCC_MIN_FOR, the family that needs it
#   FP4GEMM_QUANTIZE_GENCODE  nvcc options of the quantize and decode kernels
#   FP4GEMM_QUANTIZE_DEVICES  the compute capabilities that have machine code of these kernels: "8.0 8.6"
#   FP4GEMM_QUANTIZE_PORTABLE the least compute capability (10 * major + minor) that has portable code of them; 0: none has
#   FP4GEMM_GEMM_DEVICES      the compute capabilities that GEMM kernels exist for, built or not: "9.0 10.0 10.3"
#   FP4GEMM_GEMM_FOLDERS      the GEMM folders that are built, in the order of the table, and for each of them
#   FP4GEMM_GENCODE_sm90 ...    the nvcc options of its families
#   FP4GEMM_DEVICES_sm90 ...    the compute capabilities that its kernels serve: "9.0"
#   FP4GEMM_PTX_FOLDERS       those of the GEMM folders whose code includes PTX
macro(fp4gemm_read_archs)
  set(FP4GEMM_ARCHS "${FP4GEMM_CUDA_ARCHS}")
  if(FP4GEMM_ARCHS STREQUAL "all")
    fp4gemm_all_archs(FP4GEMM_ARCHS)
  elseif(FP4GEMM_ARCHS STREQUAL "native")
    fp4gemm_native_archs(FP4GEMM_ARCHS)
  elseif(FP4GEMM_ARCHS STREQUAL "none")
    set(FP4GEMM_ARCHS "")
  endif()
  set(FP4GEMM_NVCC_MIN 0)
  set(FP4GEMM_QUANTIZE_GENCODE "")
  set(FP4GEMM_QUANTIZE_DEVICES "")
  set(FP4GEMM_QUANTIZE_PORTABLE 0)
  set(FP4GEMM_GEMM_DEVICES "")
  set(FP4GEMM_GEMM_FOLDERS "")
  set(FP4GEMM_PTX_FOLDERS "")
  set(_known "") # the families of the table
  foreach(_row IN LISTS FP4GEMM_ARCH_TABLE)
    string(REGEX REPLACE " *\\| *" ";" _row "${_row}")
    list(GET _row 0 _family)
    list(GET _row 1 _folder)
    list(GET _row 2 _nvcc)
    list(GET _row 3 _images)
    list(GET _row 4 _devices)
    if(NOT _folder STREQUAL "-")
      string(STRIP "${FP4GEMM_GEMM_DEVICES} ${_devices}" FP4GEMM_GEMM_DEVICES)
    endif()
    list(APPEND _known "${_family}")
    if(_family MATCHES "a$" AND _devices MATCHES " ")
      message(FATAL_ERROR "archs.cmake: ${_family} serves ${_devices}, must serve one compute capability, since machine code "
                          "of sm_${_family} runs on no other")
    endif()
    if(_family IN_LIST FP4GEMM_ARCHS)
      if(_nvcc VERSION_GREATER FP4GEMM_NVCC_MIN)
        set(FP4GEMM_NVCC_MIN ${_nvcc})
        set(FP4GEMM_NVCC_MIN_FOR ${_family})
      endif()
      separate_arguments(_images)
      foreach(_image IN LISTS _images)
        if(_image MATCHES "^(.*)-ptx$")
          list(APPEND FP4GEMM_QUANTIZE_GENCODE "-gencode=arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
          if(NOT FP4GEMM_QUANTIZE_PORTABLE OR CMAKE_MATCH_1 LESS FP4GEMM_QUANTIZE_PORTABLE)
            set(FP4GEMM_QUANTIZE_PORTABLE ${CMAKE_MATCH_1})
          endif()
        elseif(_image MATCHES "f$") # PTX too: for the emulator of the tests, as of the GEMM kernels
          list(APPEND FP4GEMM_QUANTIZE_GENCODE "-gencode=arch=compute_${_image},code=[sm_${_image},compute_${_image}]")
        else()
          list(APPEND FP4GEMM_QUANTIZE_GENCODE "-gencode=arch=compute_${_image},code=sm_${_image}")
        endif()
      endforeach()
      string(STRIP "${FP4GEMM_QUANTIZE_DEVICES} ${_devices}" FP4GEMM_QUANTIZE_DEVICES)
      if(NOT _folder STREQUAL "-")
        if(NOT _folder IN_LIST FP4GEMM_GEMM_FOLDERS) # the first of the families that share it
          list(APPEND FP4GEMM_GEMM_FOLDERS "${_folder}")
          set(FP4GEMM_DEVICES_${_folder} "")
          set(FP4GEMM_GENCODE_${_folder} "")
        endif()
        string(STRIP "${FP4GEMM_DEVICES_${_folder}} ${_devices}" FP4GEMM_DEVICES_${_folder})
        if(_family MATCHES "f$") # PTX too: for later members of the family, and for the emulator of the tests
          list(APPEND FP4GEMM_PTX_FOLDERS "${_folder}")
          list(APPEND FP4GEMM_GENCODE_${_folder} "-gencode=arch=compute_${_family},code=[sm_${_family},compute_${_family}]")
        else()
          list(APPEND FP4GEMM_GENCODE_${_folder} "-gencode=arch=compute_${_family},code=sm_${_family}")
        endif()
      endif()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES FP4GEMM_PTX_FOLDERS)
  foreach(_family IN LISTS FP4GEMM_ARCHS)
    if(NOT _family IN_LIST _known)
      message(FATAL_ERROR "FP4GEMM_CUDA_ARCHS: ${_family} is unknown, must be all, native, none, or a list of: ${_known}")
    endif()
  endforeach()
endmacro()

# A Ninja pool for the CUTLASS translation units. Each needs up to 11.5 GB, so memory limits how many run at a time.
function(fp4gemm_make_cuda_job_pool)
  set(jobs "${FP4GEMM_CUDA_JOBS}")
  if(NOT jobs)
    cmake_host_system_information(RESULT ram_mb QUERY TOTAL_PHYSICAL_MEMORY)
    math(EXPR jobs "${ram_mb} / 11500")
    if(jobs LESS 1)
      set(jobs 1)
    endif()
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS fp4gemm_cuda=${jobs})
  message(STATUS "fp4gemm: up to ${jobs} CUDA compilations at a time (FP4GEMM_CUDA_JOBS)")
endfunction()

/* C interface of the PTX emulator: options, PTX files, device memory, launches and findings. Not thread-safe:
   one thread at a time may call these functions and those of the replacement CUDA runtime. */
#ifndef PTXEMU_H
#define PTXEMU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Schedules: the order of warps and asynchronous operations (TMA, tcgen05, cluster launch control). */
enum {
  PTXEMU_EAGER = 0,  /* asynchronous operations complete before another warp executes */
  PTXEMU_LAZY = 1,   /* asynchronous operations complete only when every warp waits */
  PTXEMU_RANDOM = 2, /* random order */
  PTXEMU_PCT = 3     /* probabilistic concurrency testing: random priorities that change at random points */
};

/* How products of matrices add up, for PTXEMU options and PTXEMU_ARITHMETIC. */
enum {
  PTXEMU_ROUNDED = 0,  /* exact sums, rounded once to the nearest fp32 */
  PTXEMU_TRUNCATED = 1 /* as MMA-Sim models the tensor cores: aligned, truncated, and truncated to fp32 */
};

/* Each option with its default. */
typedef struct ptxemu_options {
  int mode;               /* PTXEMU_LAZY */
  uint64_t seed;          /* 1; mode and seed determine the schedule */
  int resident_clusters;  /* 0: as many as fit with one CTA on each SM */
  int num_sms;            /* 148 */
  int compute_capability; /* 100: 10 * major + minor; 10.x or 12.x, whose limits device.cpp has */
  int pdl;                /* 1: a programmatic dependent launch starts before its predecessor; 0: launches
                             execute one after the other, and return their own errors */
  int report_unwritten_global; /* 0; 1: a load of global memory that was never written is a hazard */
  int hazards_are_fatal;       /* 0; 1: the first hazard ends the launch */
  int detect_races;            /* 1: unordered accesses of threads to shared memory are hazards */
  int loads_need_wait;         /* 0: a use of a register of a tcgen05.ld completes the load, as
                                  tcgen05.wait::ld does; 1: tcgen05.wait::ld alone does */
  int faulty_tensor_maps; /* 0; 1: cuTensorMapEncodeTiled has the fault of drivers up to CUDA 13.2, and a map
                             of a tensor with gaps that spans less than 128 KB is fatal unless its user clears
                             bit 85 */
  int arithmetic;         /* PTXEMU_ROUNDED */
  int trace_fences;       /* 0; 1: statistics count the fences and waits that order an access ("useful") */
  int driver_version;     /* CUDART_VERSION: what cudaDriverGetVersion and cuDriverGetVersion report */
  uint64_t instruction_budget; /* 2e9 warp instructions of a launch, beyond which it fails as a livelock */
} ptxemu_options;

void ptxemu_default_options(ptxemu_options* options);
void ptxemu_configure(const ptxemu_options* options);

/* Loads a .ptx file or every *.ptx file of a folder; files of targets other than sm_10* and sm_12* are
   skipped. A launch executes the kernel whose target runs on the compute capability. Kernels are parsed at
   their first launch. Returns 0, or -1 with the reason in ptxemu_last_error(). */
int ptxemu_load(const char* path);
void ptxemu_unload(void); /* unloads all PTX files */

/* Device memory is host memory: the host may use the pointer once ptxemu_synchronize() has executed the
   queued launches. New memory is filled with 0xFF and counts as never written. */
void* ptxemu_malloc(size_t bytes);
int ptxemu_free(void* pointer);
void ptxemu_poison(void* pointer, size_t bytes);       /* fills with 0xFF, counts as never written */
void ptxemu_mark_written(void* pointer, size_t bytes); /* after writing through the pointer on the host */

/* Launches a kernel by its name in the PTX. `arguments` is its parameter block, in the layout of a C struct.
   Returns what cudaLaunchKernelExC returns: 0, or a cudaError_t. */
int ptxemu_launch(const char* kernel, const uint32_t grid[3], const uint32_t block[3],
                  const uint32_t cluster[3], uint32_t dynamic_shared_bytes, const void* arguments,
                  size_t argument_bytes, int programmatic);

/* Executes the queued launches. Returns 0, or the cudaError_t of the first launch that has failed since the
 * last call. */
int ptxemu_synchronize(void);

/* The report of the last failure, "" if there was none since ptxemu_clear(). Valid until the next call. */
const char* ptxemu_last_error(void);
/* Findings that do not end a launch: their number, and a report for each kind and line of PTX. */
uint64_t ptxemu_num_hazards(void);
const char* ptxemu_hazards(void);
void ptxemu_clear(void); /* forgets errors and hazards */

/* Counts of what was executed since the last reset, as JSON: opcodes, instruction descriptors, TMA modes, ...
 */
const char* ptxemu_statistics(void);
void ptxemu_reset_statistics(void);

#ifdef __cplusplus
}
#endif

#endif

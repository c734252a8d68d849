// The C interface of ptxemu.h. A call that reads or changes what launches use executes the queued launches
// first.
#include "ptxemu.h"

#include <cuda_runtime_api.h>

#include "memory.hpp"
#include "queue.hpp"
#include "runtime.hpp"
#include "session.hpp"

using ptxemu::DeviceMemory;
using ptxemu::LaunchQueue;
using ptxemu::Session;

extern "C" {

void ptxemu_default_options(ptxemu_options* options) {
  *options = {};
  options->mode = PTXEMU_LAZY;
  options->seed = 1;
  options->num_sms = 148;
  options->compute_capability = 100;
  options->pdl = 1;
  options->arithmetic = PTXEMU_ROUNDED;
  options->detect_races = 1;
  options->driver_version = CUDART_VERSION;
  options->instruction_budget = 2000000000;
}

void ptxemu_configure(ptxemu_options const* options) {
  LaunchQueue::instance().flush();
  Session::instance().options = *options;
}

int ptxemu_load(char const* path) {
  LaunchQueue::instance().flush();
  try {
    Session::instance().library.load(path);
  } catch (std::exception const& error) {
    Session::instance().report_fatal(error.what());
    return -1;
  }
  return 0;
}

void ptxemu_unload() {
  LaunchQueue::instance().flush();
  Session::instance().library.clear();
}

void* ptxemu_malloc(size_t bytes) {
  LaunchQueue::instance().flush();
  return DeviceMemory::instance().allocate(bytes);
}

int ptxemu_free(void* pointer) {
  LaunchQueue::instance().flush();
  return pointer == nullptr || DeviceMemory::instance().free(pointer) ? 0 : -1;
}

void ptxemu_poison(void* pointer, size_t bytes) {
  LaunchQueue::instance().flush();
  std::memset(pointer, 0xFF, bytes);
  DeviceMemory::instance().mark(reinterpret_cast<uint64_t>(pointer), bytes, false);
}

void ptxemu_mark_written(void* pointer, size_t bytes) {
  DeviceMemory::instance().mark(reinterpret_cast<uint64_t>(pointer), bytes, true);
}

int ptxemu_launch(char const* kernel, uint32_t const grid[3], uint32_t const block[3],
                  uint32_t const cluster[3], uint32_t dynamic_shared_bytes, void const* arguments,
                  size_t argument_bytes, int programmatic) {
  Session& session = Session::instance();
  ptxemu::Launch launch = {};
  try {
    launch.kernel = ptxemu::find_kernel(std::string(kernel));
  } catch (std::exception const& error) {
    session.report_fatal(error.what());
    return cudaErrorInvalidDeviceFunction;
  }
  if (launch.kernel == nullptr) {
    return cudaErrorInvalidDeviceFunction;
  }
  if (argument_bytes != launch.kernel->param_bytes) {
    session.report_fatal(ptxemu::format_text("%s expects %u bytes of arguments, got %zu", kernel,
                                             launch.kernel->param_bytes, argument_bytes));
    return cudaErrorInvalidValue;
  }
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = grid[i];
    launch.block[i] = block[i];
    launch.cluster[i] = cluster[i];
  }
  launch.dynamic_shared_bytes = dynamic_shared_bytes;
  launch.programmatic = programmatic != 0;
  auto const* const bytes = static_cast<uint8_t const*>(arguments);
  launch.params.assign(bytes, bytes + argument_bytes);
  return LaunchQueue::instance().submit(std::move(launch));
}

int ptxemu_synchronize() { return LaunchQueue::instance().flush(); }

char const* ptxemu_last_error() { return Session::instance().last_error.c_str(); }

uint64_t ptxemu_num_hazards() { return Session::instance().num_hazards; }

char const* ptxemu_hazards() {
  static std::string text;
  text.clear();
  for (std::string const& hazard : Session::instance().hazards) {
    text += hazard + "\n";
  }
  return text.c_str();
}

void ptxemu_clear() {
  LaunchQueue::instance().flush();
  Session& session = Session::instance();
  session.last_error.clear();
  session.hazards.clear();
  session.num_hazards = 0;
}

char const* ptxemu_statistics() {
  static std::string text;
  LaunchQueue::instance().flush();
  text = Session::instance().statistics.json();
  return text.c_str();
}

void ptxemu_reset_statistics() {
  LaunchQueue::instance().flush();
  Session::instance().statistics.reset();
}

}  // extern "C"

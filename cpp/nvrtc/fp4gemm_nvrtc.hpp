// What a kernel that is compiled at run time includes first.
#pragma once

#include <cstdint>
// CUTLASS's headers for NVRTC include each other in a circle, which this one must begin.
#include "cutlass/platform/platform.h"

// <stdint.h> for NVRTC, which cuda.h includes.
#pragma once

#include <cstdint>

// <stdlib.h> for NVRTC: cuda.h includes it for size_t, which NVRTC defines itself.
#pragma once

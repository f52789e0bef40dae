// The kernels for the baseline of the architecture: SSE2 on x86-64, NEON on aarch64, 16-byte vectors of
// the compiler elsewhere.

#define PHALANX_ISA baseline
#if defined(__aarch64__)
#define PHALANX_ISA_NAME "neon"
#else
#define PHALANX_ISA_NAME "baseline"
#endif
#define PHALANX_VECTOR_BYTES 16

#include "reduce_kernels.inc.hpp"

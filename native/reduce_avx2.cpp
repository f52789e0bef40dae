// The kernels for AVX2 with F16C (x86-64 since 2013). Compile with -mavx2 -mf16c.

#if defined(__x86_64__)

#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif

#define PHALANX_ISA avx2
#define PHALANX_ISA_NAME "avx2"
#define PHALANX_VECTOR_BYTES 32

#include "reduce_kernels.inc.hpp"

#endif

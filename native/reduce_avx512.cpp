// The kernels for AVX-512. Compile with -mavx512f -mavx512bw -mavx512dq -mavx512vl.

#if defined(__x86_64__)

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || \
    !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#endif

#define PHALANX_ISA avx512
#define PHALANX_ISA_NAME "avx512"
#define PHALANX_VECTOR_BYTES 64

#include "reduce_kernels.inc.hpp"

#endif

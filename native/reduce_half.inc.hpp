// Vector conversions between float16 or bfloat16 and float32. Part of reduce_kernels.inc.hpp.
//
// They are exact or rounded to nearest even, keep infinities and subnormals, and quiet NaNs. For values
// that float16 can hold, the result does not depend on the thread's flush-to-zero mode, so the portable
// code and the hardware give the same bits.

using Halves = VectorOf<std::uint16_t, kVectorBytes / 2>;
using Floats = Vector<float>;
using Words = Vector<std::int32_t>;  // signed, because SSE2 compares only those
using Bits = Vector<std::uint32_t>;

INLINE Halves narrow(Bits words) { return __builtin_convertvector(words, Halves); }
INLINE Bits widen(Halves halves) { return __builtin_convertvector(halves, Bits); }
INLINE Words broadcast(std::int32_t value) { return Words{} + value; }

#if PHALANX_VECTOR_BYTES == 64 && defined(__AVX512F__)

// Masked forms with a full mask are the same instructions; the plain ones make gcc 12 warn about an
// uninitialised variable in its own header (GCC bug 105593).
INLINE Floats from_float16(Halves h) {
  return as<Floats>(_mm512_maskz_cvtph_ps(0xffff, as<__m256i>(h)));
}

INLINE Halves to_float16(Floats f) {
  constexpr int nearest_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return as<Halves>(_mm512_maskz_cvtps_ph(0xffff, as<__m512>(f), nearest_even));
}

#elif PHALANX_VECTOR_BYTES == 32 && defined(__F16C__)

INLINE Floats from_float16(Halves h) { return as<Floats>(_mm256_cvtph_ps(as<__m128i>(h))); }

INLINE Halves to_float16(Floats f) {
  return as<Halves>(_mm256_cvtps_ph(as<__m256>(f), _MM_FROUND_TO_NEAREST_INT));
}

#elif PHALANX_VECTOR_BYTES == 16 && defined(__aarch64__)

INLINE Floats from_float16(Halves h) { return as<Floats>(vcvt_f32_f16(as<float16x4_t>(h))); }
INLINE Halves to_float16(Floats f) { return as<Halves>(vcvt_f16_f32(as<float32x4_t>(f))); }

#else

// After Fabian Giesen's half_to_float_fast4 and float_to_half_fast3_rtne (public domain): integer
// arithmetic moves the exponent; one float addition normalises, or rounds, what is subnormal.

INLINE Floats from_float16(Halves half) {
  constexpr std::int32_t rebias = (127 - 15) << 23;
  constexpr std::int32_t top_exponent = 0x7c00 << 13;
  const Words h = as<Words>(widen(half));
  const Words sign = as<Words>(as<Bits>(h & 0x8000) << 16);
  const Words magnitude = (h & 0x7fff) << 13;
  const Words exponent = magnitude & top_exponent;
  const Words normal = magnitude + rebias;
  const Words infinity_or_nan = normal + rebias;
  const Floats smallest_normal = as<Floats>(broadcast(113 << 23));
  const Words subnormal = as<Words>(as<Floats>(normal + (1 << 23)) - smallest_normal);
  const Words finite = exponent == 0 ? subnormal : normal;
  return as<Floats>((exponent == top_exponent ? infinity_or_nan : finite) | sign);
}

INLINE Halves to_float16(Floats f) {
  constexpr std::int32_t infinity = 255 << 23;
  constexpr std::int32_t overflow = (127 + 16) << 23;  // from 65520 on, `normal` rounds to infinity
  constexpr std::int32_t smallest_normal = 113 << 23;
  constexpr std::int32_t aligner = ((127 - 15) + (23 - 10) + 1) << 23;
  const Words sign = as<Words>(as<Bits>(f) >> 31 << 15);
  const Words magnitude = as<Words>(f) & 0x7fffffff;
  const Words infinity_or_nan = magnitude > infinity ? broadcast(0x7e00) : broadcast(0x7c00);
  const Words aligned = as<Words>(as<Floats>(magnitude) + as<Floats>(broadcast(aligner)));
  const Words subnormal = aligned - aligner;
  const Words odd = (magnitude >> 13) & 1;
  const Words normal = (magnitude - ((127 - 15) << 23) + 0xfff + odd) >> 13;
  const Words finite = magnitude < smallest_normal ? subnormal : normal;
  return narrow(as<Bits>((magnitude >= overflow ? infinity_or_nan : finite) | sign));
}

#endif

INLINE Floats from_bfloat16(Halves h) { return as<Floats>(widen(h) << 16); }

// The instruction of AVX512_BF16 flushes subnormals to zero, which gives other bits.
INLINE Bits rounded_to_bfloat16(Floats f) {  // in the upper half; the lower half is undefined
  const Bits bits = as<Bits>(f);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits quiet_nan = bits | 0x400000;
  return f != f ? quiet_nan : rounded;
}

INLINE Halves to_bfloat16(Floats f) { return narrow(rounded_to_bfloat16(f) >> 16); }

// The float32 values of what would be stored.
INLINE Floats round_to_float16(Floats f) { return from_float16(to_float16(f)); }
INLINE Floats round_to_bfloat16(Floats f) {
  return as<Floats>(rounded_to_bfloat16(f) & 0xffff0000u);
}

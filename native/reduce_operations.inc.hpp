// One struct per reduce operation. Part of reduce_kernels.inc.hpp.
//
// `prepare` is applied to each input, `combine` to the accumulator and the next input, `finish` to the
// accumulator before it is stored. Integers add and multiply as unsigned, which wraps around; signedness
// matters only for division and order.

template <class F>
struct Operation {
  using Format = F;
  using Lanes = typename F::Lanes;

  explicit Operation(const KernelArguments&) {}
  INLINE static Lanes prepare(Lanes lanes) { return lanes; }
  INLINE static Lanes finish(Lanes lanes) { return lanes; }
};

template <class F>
struct Sum : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return a + b; }
};

// Rounds each sum to the element type, as if it were stored and loaded again.
template <class F>
struct RoundedSum : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return F::round(a + b); }
};

template <class F>
struct Product : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return a * b; }
};

template <class F>
struct And : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return a & b; }
};

template <class F>
struct Or : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return a | b; }
};

template <class F>
struct Xor : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return a ^ b; }
};

// The later input wins if it is smaller or NaN, so a NaN stays, and the first of two zeros. For integers
// the compiler removes the comparison with itself.
template <class F>
struct Min : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return (b < a) | (b != b) ? b : a; }
};

template <class F>
struct Max : Operation<F> {
  using Lanes = typename F::Lanes;
  using Operation<F>::Operation;
  INLINE static Lanes combine(Lanes a, Lanes b) { return (b > a) | (b != b) ? b : a; }
};

// S is the sum to divide.
template <class S>
struct Average : S {
  using Lane = typename S::Format::Lane;
  using Lanes = typename S::Format::Lanes;
  Lanes divisor;

  explicit Average(const KernelArguments& a)
      : S(a), divisor(Lanes{} + static_cast<Lane>(a.divisor)) {}
  INLINE Lanes finish(Lanes sum) const { return sum / divisor; }
};

// For a power of two the reciprocal is exact, so the product has the same bits as the quotient. Division
// limits the speed in the first-level cache.
template <class S>
struct AverageOfPowerOfTwo : S {
  using Lane = typename S::Format::Lane;
  using Lanes = typename S::Format::Lanes;
  Lanes reciprocal;

  explicit AverageOfPowerOfTwo(const KernelArguments& a)
      : S(a), reciprocal(Lanes{} + 1 / static_cast<Lane>(a.divisor)) {}
  INLINE Lanes finish(Lanes sum) const { return sum * reciprocal; }
};

// Of a normal number, whose significand has 52 bits beside the leading one.
inline bool is_power_of_two(double value) { return as<std::uint64_t>(value) << 12 == 0; }

// Integers divide one by one, in `Wide`: there is no vector instruction, and the number of inputs may not
// fit the element type (200 ranks, int8). F has unsigned lanes; Signed is the element type.
template <class F, class Signed, class Wide>
struct IntegerAverage : Sum<F> {
  using Lane = typename F::Lane;
  using Lanes = typename F::Lanes;
  Wide divisor;

  explicit IntegerAverage(const KernelArguments& a)
      : Sum<F>(a), divisor(static_cast<Wide>(a.inputs)) {}

  Lanes finish(Lanes sum) const {
    Signed lanes[sizeof(Lanes) / sizeof(Lane)];
    __builtin_memcpy(lanes, &sum, sizeof lanes);
    for (Signed& lane : lanes) lane = static_cast<Signed>(lane / divisor);
    return load_bits<Lanes>(reinterpret_cast<const char*>(lanes));
  }
};

template <class Lane>
Lane factor_as(double factor) {
  if constexpr (static_cast<Lane>(0.5) != 0) {
    return static_cast<Lane>(factor);
  } else {
    // A negative double does not convert to unsigned lanes directly.
    return static_cast<Lane>(factor < 0 ? static_cast<std::uint64_t>(
                                              static_cast<std::int64_t>(factor))
                                        : static_cast<std::uint64_t>(factor));
  }
}

template <class F>
struct PremulSum : Sum<F> {
  using Lanes = typename F::Lanes;
  Lanes factor;

  explicit PremulSum(const KernelArguments& a)
      : Sum<F>(a), factor(Lanes{} + factor_as<typename F::Lane>(a.factor)) {}
  INLINE Lanes prepare(Lanes lanes) const { return lanes * factor; }
};

template <std::size_t... I>
struct Indices {};

template <std::size_t n, std::size_t... I>
struct CountTo : CountTo<n - 1, n - 1, I...> {};

template <std::size_t... I>
struct CountTo<0, I...> {
  using Type = Indices<I...>;
};

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, without special cases, like torch. With interleaved lanes:
// [a a] * [c d] + [-b b] * [d c].
template <class F>
struct ComplexProduct : Operation<F> {
  using Lane = typename F::Lane;
  using Lanes = typename F::Lanes;
  using Every = typename CountTo<sizeof(Lanes) / sizeof(Lane)>::Type;
  using Operation<F>::Operation;

  template <std::size_t... I>
  INLINE static Lanes multiply(Lanes x, Lanes y, Indices<I...>) {
    const Lanes real = __builtin_shufflevector(x, x, (I & ~std::size_t{1})...);
    const Lanes imaginary = __builtin_shufflevector(x, x, (I | 1)...);
    const Lanes swapped = __builtin_shufflevector(y, y, (I ^ 1)...);
    const Lanes sign = {(I % 2 == 0 ? Lane{-1} : Lane{1})...};
    return real * y + sign * imaginary * swapped;
  }
  INLINE static Lanes combine(Lanes a, Lanes b) { return multiply(a, b, Every{}); }
};

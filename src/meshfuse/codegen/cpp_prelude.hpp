// What every generated kernel starts with. No header is included: parsing one costs more time than
// the rest of the compilation. Element functions take a scalar or a tile and treat each lane alike.
//
// A tile of W lanes is a GCC vector if it fits a register, otherwise a pair of tiles of W/2 lanes, so
// that the compiler never sees a vector wider than the machine. Lanes of bool are int32 masks, 0 or -1.
// Contraction into FMA is off for kernels; here mf_fma asks for it by name.

typedef __INT64_TYPE__ int64_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT8_TYPE__ uint8_t;

#if defined(__AVX512F__)
#define MF_REGISTER_BYTES 64
#elif defined(__AVX2__)
#define MF_REGISTER_BYTES 32
#else
#define MF_REGISTER_BYTES 16
#endif
#define MF_INLINE static inline __attribute__((always_inline))
#define MF_INLINE_MEMBER inline __attribute__((always_inline))

// ---------------------------------------------------------------- integers of index expressions

MF_INLINE int64_t mf_floordiv(int64_t a, int64_t b) {
  const int64_t q = a / b;
  return q - (a % b != 0 && (a % b < 0) != (b < 0));
}
MF_INLINE int64_t mf_mod(int64_t a, int64_t b) {
  const int64_t r = a % b;
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
MF_INLINE int64_t mf_min(int64_t a, int64_t b) { return a < b ? a : b; }
MF_INLINE int64_t mf_max(int64_t a, int64_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------- tiles

template <class T, int W> struct mf_pair;
template <class T, int W, bool fits> struct mf_choose { typedef mf_pair<T, W> type; };
template <class T, int W> struct mf_choose<T, W, true> {
  typedef T type __attribute__((vector_size(W * sizeof(T))));
};
template <class T> struct mf_choose<T, 1, true> { typedef T type; };
template <class T, int W>
using mf_tile = typename mf_choose<T, W, (W * sizeof(T) <= MF_REGISTER_BYTES)>::type;
template <class T, int W> struct mf_pair {
  mf_tile<T, W / 2> low, high;
};

template <class T> struct mf_plain { typedef T type; };
template <class T> struct mf_plain<T&> { typedef T type; };
template <class V> struct mf_traits {  // a GCC vector
  static V& some();
  typedef typename mf_plain<decltype(some()[0])>::type element;
  static constexpr int lanes = sizeof(V) / sizeof(element);
  static constexpr bool paired = false;
};
template <class T, int W> struct mf_traits<mf_pair<T, W>> {
  typedef T element;
  static constexpr int lanes = W;
  static constexpr bool paired = true;
};
template <class T> struct mf_scalar_traits {
  typedef T element;
  static constexpr int lanes = 1;
  static constexpr bool paired = false;
};
template <> struct mf_traits<bool> : mf_scalar_traits<bool> {};
template <> struct mf_traits<float> : mf_scalar_traits<float> {};
template <> struct mf_traits<double> : mf_scalar_traits<double> {};
template <> struct mf_traits<int32_t> : mf_scalar_traits<int32_t> {};
template <> struct mf_traits<int64_t> : mf_scalar_traits<int64_t> {};
template <> struct mf_traits<uint32_t> : mf_scalar_traits<uint32_t> {};
template <> struct mf_traits<uint16_t> : mf_scalar_traits<uint16_t> {};
template <> struct mf_traits<uint8_t> : mf_scalar_traits<uint8_t> {};
template <class V> using mf_element = typename mf_traits<V>::element;

template <class T, int W> constexpr bool mf_fits = W * sizeof(T) <= MF_REGISTER_BYTES;
template <int... I> struct mf_numbers {};
template <int N> using mf_count = mf_numbers<__integer_pack(N)...>;

template <class V, int... I> MF_INLINE auto mf_take(V x, int offset, mf_numbers<I...>) {
  if constexpr (sizeof...(I) == 1) {
    return x[offset];
  } else {
    return mf_tile<mf_element<V>, sizeof...(I)>{x[offset + I]...};
  }
}
template <class V> MF_INLINE auto mf_low(V x) {
  if constexpr (mf_traits<V>::paired) return x.low;
  else return mf_take(x, 0, mf_count<mf_traits<V>::lanes / 2>{});
}
template <class V> MF_INLINE auto mf_high(V x) {
  constexpr int half = mf_traits<V>::lanes / 2;
  if constexpr (mf_traits<V>::paired) return x.high;
  else return mf_take(x, half, mf_count<half>{});
}
template <class T, int W, class V, int... I>
MF_INLINE mf_tile<T, W> mf_concatenate(V low, V high, mf_numbers<I...>) {
  if constexpr (W == 2) return mf_tile<T, W>{low, high};
#if __has_builtin(__builtin_shufflevector)
  else return __builtin_shufflevector(low, high, I...);
#else  // g++ before 12
  mf_tile<T, W> both;
  __builtin_memcpy(&both, &low, sizeof low);
  __builtin_memcpy((uint8_t*)&both + sizeof low, &high, sizeof high);
  return both;
#endif
}
template <class T, int W>
MF_INLINE mf_tile<T, W> mf_join(mf_tile<T, W / 2> low, mf_tile<T, W / 2> high) {
  if constexpr (!mf_fits<T, W>) return {low, high};
  else return mf_concatenate<T, W>(low, high, mf_count<W>{});
}

template <class T, int... I> MF_INLINE auto mf_spread_over(T x, mf_numbers<I...>) {
  return mf_tile<T, sizeof...(I)>{((void)I, x)...};
}
template <class T, int W> MF_INLINE mf_tile<T, W> mf_spread(T x) {
  if constexpr (W == 1) return x;
  else if constexpr (mf_fits<T, W>) return mf_spread_over(x, mf_count<W>{});
  else return {mf_spread<T, W / 2>(x), mf_spread<T, W / 2>(x)};
}
template <int W> MF_INLINE mf_tile<int32_t, W> mf_spread_mask(bool x) {
  return mf_spread<int32_t, W>(-(int32_t)x);
}
// The constant x in each lane of a V.
template <class V> MF_INLINE V mf_all(mf_element<V> x) {
  return mf_spread<mf_element<V>, mf_traits<V>::lanes>(x);
}
template <class T, int... I> MF_INLINE auto mf_lanes_from(T first, mf_numbers<I...>) {
  return mf_tile<T, sizeof...(I)>{(T)(first + I)...};
}
// first, first + 1, ...
template <class T, int W> MF_INLINE mf_tile<T, W> mf_lanes(T first) {
  if constexpr (mf_fits<T, W>) return mf_lanes_from(first, mf_count<W>{});
  else return {mf_lanes<T, W / 2>(first), mf_lanes<T, W / 2>(first + W / 2)};
}

template <class F, class V> MF_INLINE V mf_map(F f, V x) {
  if constexpr (mf_traits<V>::paired) return {mf_map(f, x.low), mf_map(f, x.high)};
  else return f(x);
}
template <class F, class V> MF_INLINE V mf_zip(F f, V a, V b) {
  if constexpr (mf_traits<V>::paired) return {mf_zip(f, a.low, b.low), mf_zip(f, a.high, b.high)};
  else return f(a, b);
}
#define MF_PAIR_OPERATOR(op)                                                               \
  template <class T, int W>                                                                \
  MF_INLINE mf_pair<T, W> operator op(mf_pair<T, W> a, mf_pair<T, W> b) {                  \
    return {a.low op b.low, a.high op b.high};                                             \
  }
MF_PAIR_OPERATOR(+)
MF_PAIR_OPERATOR(-)
MF_PAIR_OPERATOR(*)
MF_PAIR_OPERATOR(/)
MF_PAIR_OPERATOR(&)
MF_PAIR_OPERATOR(|)
MF_PAIR_OPERATOR(^)
template <class T, int W> MF_INLINE mf_pair<T, W> operator-(mf_pair<T, W> a) {
  return {-a.low, -a.high};
}
template <class T, int W> MF_INLINE mf_pair<T, W> operator~(mf_pair<T, W> a) {
  return {~a.low, ~a.high};
}

// The same bits as elements of type T, which is as wide as V's.
template <class T, class V> MF_INLINE mf_tile<T, mf_traits<V>::lanes> mf_bits(V x) {
  mf_tile<T, mf_traits<V>::lanes> bits;
  static_assert(sizeof bits == sizeof x, "element widths differ");
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}
// Another element type; float to integer truncates.
template <class T, class V> MF_INLINE mf_tile<T, mf_traits<V>::lanes> mf_convert(V x) {
  constexpr int W = mf_traits<V>::lanes;
  if constexpr (W == 1) return (T)x;
  else if constexpr (mf_fits<mf_element<V>, W> && mf_fits<T, W>)
    return __builtin_convertvector(x, mf_tile<T, W>);
  else return mf_join<T, W>(mf_convert<T>(mf_low(x)), mf_convert<T>(mf_high(x)));
}

// ---------------------------------------------------------------- masks

template <class V> struct mf_mask_of { typedef mf_tile<int32_t, mf_traits<V>::lanes> type; };
template <> struct mf_mask_of<bool> { typedef bool type; };
template <> struct mf_mask_of<float> { typedef bool type; };
template <> struct mf_mask_of<double> { typedef bool type; };
template <> struct mf_mask_of<int32_t> { typedef bool type; };
template <> struct mf_mask_of<int64_t> { typedef bool type; };
template <class V> using mf_mask = typename mf_mask_of<V>::type;

// f compares two scalars or vectors.
template <class F, class V> MF_INLINE mf_mask<V> mf_compare(F f, V a, V b) {
  constexpr int W = mf_traits<V>::lanes;
  if constexpr (W == 1) {
    return f(a, b);
  } else if constexpr (mf_traits<V>::paired) {
    return mf_join<int32_t, W>(mf_compare(f, a.low, b.low), mf_compare(f, a.high, b.high));
  } else if constexpr (sizeof(mf_element<V>) == 4) {
    return (mf_tile<int32_t, W>)f(a, b);
  } else {
    return mf_convert<int32_t>((mf_tile<int64_t, W>)f(a, b));
  }
}
template <class V> MF_INLINE mf_mask<V> mf_less(V a, V b) {
  return mf_compare([](auto x, auto y) { return x < y; }, a, b);
}
template <class V> MF_INLINE mf_mask<V> mf_less_equal(V a, V b) {
  return mf_compare([](auto x, auto y) { return x <= y; }, a, b);
}
template <class V> MF_INLINE mf_mask<V> mf_equal(V a, V b) {
  return mf_compare([](auto x, auto y) { return x == y; }, a, b);
}
template <class V> MF_INLINE mf_mask<V> mf_differ(V a, V b) {
  return mf_compare([](auto x, auto y) { return x != y; }, a, b);
}
// Whether any lane of a mask is set.
MF_INLINE bool mf_any_lane(bool mask) { return mask; }
MF_INLINE bool mf_any_lane(int32_t mask) { return mask != 0; }
template <class M> MF_INLINE bool mf_any_lane(M mask) {
  return mf_any_lane(mf_low(mask) | mf_high(mask));
}
MF_INLINE bool mf_not(bool a) { return !a; }
template <class V> MF_INLINE V mf_not(V a) { return ~a; }
template <class V> MF_INLINE mf_mask<V> mf_nonzero(V a) {
  return mf_compare([](auto x, auto y) { return x != y; }, a, mf_all<V>(0));
}
template <class V> MF_INLINE V mf_select(mf_mask<V> mask, V a, V b) {
  if constexpr (mf_traits<V>::lanes == 1) {
    return mask ? a : b;
  } else if constexpr (mf_traits<V>::paired) {
    return {mf_select<decltype(a.low)>(mf_low(mask), a.low, b.low),
            mf_select<decltype(a.high)>(mf_high(mask), a.high, b.high)};
  } else if constexpr (sizeof(mf_element<V>) == 4) {
    return mask ? a : b;
  } else {
    return mf_convert<int64_t>(mask) ? a : b;
  }
}
// Lanes 0 .. active-1.
template <int W> MF_INLINE mf_tile<int32_t, W> mf_first(int64_t active) {
  const int32_t count = (int32_t)mf_max(0, mf_min(active, W));
  return mf_less(mf_lanes<int32_t, W>(0), mf_spread<int32_t, W>(count));
}
// `next` in the active lanes, `old` in the others.
template <class V> MF_INLINE V mf_keep(int64_t active, V next, V old) {
  constexpr int W = mf_traits<V>::lanes;
  if (__builtin_expect(active >= W, 1)) return next;
  return mf_select<V>(mf_first<W>(active), next, old);
}

// ---------------------------------------------------------------- element types in memory

struct mf_bfloat16 { uint16_t bits; };
struct mf_half { uint16_t bits; };
struct mf_bool { uint8_t bits; };

// Round to nearest even on 16 bits of exponent and mantissa; NaN stays NaN.
template <class V> MF_INLINE auto mf_to_bfloat16_bits(V x) {
  const auto u = mf_bits<uint32_t>(x);
  typedef mf_tile<uint32_t, mf_traits<V>::lanes> U;
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U quiet = (u >> 16) | 0x40u;
  return x != x ? quiet : rounded;
}
template <class U> MF_INLINE auto mf_from_bfloat16_bits(U bits) {
  return mf_bits<float>((U)(bits << 16));
}

// Normal results round by an addition to the mantissa; subnormal ones by the addition of a float whose
// last place is the smallest subnormal.
template <class V> MF_INLINE auto mf_to_half_bits(V x) {
  typedef mf_tile<uint32_t, mf_traits<V>::lanes> U;
  const U u = mf_bits<uint32_t>(x);
  const U sign = (u >> 16) & 0x8000u;
  const U magnitude = u & 0x7fffffffu;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U shifted = mf_bits<uint32_t>((V)(mf_bits<float>(magnitude) + mf_all<V>(0.5f)));
  const U subnormal = shifted - 0x3f000000u;
  const U infinite = mf_all<U>(0x7c00u);
  const U quiet = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U number = magnitude >= 0x47800000u ? infinite : finite;
  return (U)(sign | (magnitude > 0x7f800000u ? quiet : number));
}
template <class U> MF_INLINE auto mf_from_half_bits(U bits) {
  typedef mf_tile<float, mf_traits<U>::lanes> V;
  const U sign = (bits & 0x8000u) << 16;
  const U magnitude = (bits & 0x7fffu) << 13;
  const V scaled = mf_bits<float>(magnitude) * mf_all<V>(0x1p112f);  // exact, subnormals included
  const U finite = mf_bits<uint32_t>(scaled);
  const U special = magnitude | 0x7f800000u;
  return mf_bits<float>((U)(sign | (magnitude >= 0x0f800000u ? special : finite)));
}
// To 16 bits and back, by the machine where it can.
template <class V> MF_INLINE mf_tile<uint16_t, mf_traits<V>::lanes> mf_pack_half(V x) {
  typedef mf_tile<uint16_t, mf_traits<V>::lanes> H;
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    typedef short S __attribute__((vector_size(32)));
    return (H)__builtin_ia32_vcvtps2ph512_mask(x, 0, S{}, (uint16_t)-1);
  }
#endif
#if defined(__F16C__)
  if constexpr (sizeof(V) == 32) return (H)__builtin_ia32_vcvtps2ph256(x, 0);
#endif
  return mf_convert<uint16_t>(mf_to_half_bits(x));
}
template <class H> MF_INLINE mf_tile<float, mf_traits<H>::lanes> mf_unpack_half(H bits) {
  typedef mf_tile<float, mf_traits<H>::lanes> V;
#if defined(__AVX512F__)
  if constexpr (sizeof(H) == 32) {
    typedef short S __attribute__((vector_size(32)));
    return __builtin_ia32_vcvtph2ps512_mask((S)bits, V{}, (uint16_t)-1, 4);
  }
#endif
#if defined(__F16C__)
  if constexpr (sizeof(H) == 16) {
    typedef short S __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps256((S)bits);
  }
#endif
  return mf_from_half_bits(mf_convert<uint32_t>(bits));
}
template <class V> MF_INLINE V mf_round_bfloat16(V x) {
  return mf_map([](auto v) { return mf_from_bfloat16_bits(mf_to_bfloat16_bits(v)); }, x);
}
template <class V> MF_INLINE V mf_round_half(V x) {
  return mf_map([](auto v) { return mf_unpack_half(mf_pack_half(v)); }, x);
}

template <class S> struct mf_storage { typedef S element; };
template <> struct mf_storage<mf_bfloat16> { typedef float element; };
template <> struct mf_storage<mf_half> { typedef float element; };
template <> struct mf_storage<mf_bool> { typedef int32_t element; };

template <class S, int W> MF_INLINE auto mf_load_raw(const void* p) {
  mf_tile<S, W> raw;
  __builtin_memcpy(&raw, p, sizeof raw);
  return raw;
}
// W elements from p on, as lanes. One element of bool is a bool.
template <int W, class S> MF_INLINE auto mf_load(const S* p) {
  typedef typename mf_storage<S>::element T;
  if constexpr (!mf_fits<T, W>) {
    return mf_join<T, W>(mf_load<W / 2>(p), mf_load<W / 2>(p + W / 2));
  } else if constexpr (__is_same(S, mf_bfloat16)) {
    return mf_from_bfloat16_bits(mf_convert<uint32_t>(mf_load_raw<uint16_t, W>(p)));
  } else if constexpr (__is_same(S, mf_half)) {
    return mf_unpack_half(mf_load_raw<uint16_t, W>(p));
  } else if constexpr (__is_same(S, mf_bool)) {
    return mf_nonzero(mf_convert<int32_t>(mf_load_raw<uint8_t, W>(p)));
  } else {
    return mf_load_raw<S, W>(p);
  }
}
template <class R> MF_INLINE void mf_store_raw(void* p, R raw) {
  __builtin_memcpy(p, &raw, sizeof raw);
}
template <class S, class V> MF_INLINE void mf_store(S* p, V x) {
  if constexpr (mf_traits<V>::paired) {
    mf_store(p, x.low);
    mf_store(p + mf_traits<V>::lanes / 2, x.high);
  } else if constexpr (__is_same(S, mf_bfloat16)) {
    mf_store_raw(p, mf_convert<uint16_t>(mf_to_bfloat16_bits(x)));
  } else if constexpr (__is_same(S, mf_half)) {
    mf_store_raw(p, mf_pack_half(x));
  } else if constexpr (__is_same(S, mf_bool) && !__is_same(V, bool)) {
    mf_store_raw(p, mf_convert<uint8_t>(x & mf_all<V>(1)));
  } else {
    mf_store_raw(p, x);
  }
}

// The forms below go lane by lane. Inactive lanes are not touched; loaded, they are 0.
template <int W, class S> MF_INLINE auto mf_load_strided(const S* p, int64_t stride, int64_t active) {
  S lanes[W];
  __builtin_memset(lanes, 0, sizeof lanes);
  for (int64_t i = 0; i < mf_min(active, W); ++i) lanes[i] = p[i * stride];
  return mf_load<W>(lanes);
}
template <int W, class S> MF_INLINE auto mf_load_strided(const S* p, int64_t stride) {
  S lanes[W];
  for (int64_t i = 0; i < W; ++i) lanes[i] = p[i * stride];
  return mf_load<W>(lanes);
}
template <int W, class S> MF_INLINE auto mf_load(const S* p, int64_t active) {
  if (__builtin_expect(active >= W, 1)) return mf_load<W>(p);
  return mf_load_strided<W>(p, 1, active);
}
// The same element in each lane.
template <int W, class S> MF_INLINE auto mf_load_same(const S* p) {
  if constexpr (__is_same(S, mf_bool)) return mf_spread_mask<W>(mf_load<1>(p));
  else return mf_spread<typename mf_storage<S>::element, W>(mf_load<1>(p));
}
template <int W, class S> MF_INLINE auto mf_load_same(const S* p, int64_t active) {
  if (__builtin_expect(active >= W, 1)) return mf_load_same<W>(p);
  return mf_load_strided<W>(p, 0, active);
}
template <class S, class V>
MF_INLINE void mf_store_strided(S* p, int64_t stride, V x, int64_t active = mf_traits<V>::lanes) {
  S lanes[mf_traits<V>::lanes];
  mf_store(lanes, x);
  for (int64_t i = 0; i < mf_min(active, mf_traits<V>::lanes); ++i) p[i * stride] = lanes[i];
}
template <class S, class V> MF_INLINE void mf_store(S* p, V x, int64_t active) {
  if (__builtin_expect(active >= mf_traits<V>::lanes, 1)) return mf_store(p, x);
  mf_store_strided(p, 1, x, active);
}

// ---------------------------------------------------------------- arithmetic

// One function of scalars on each lane of a scalar, vector or pair.
template <class F, class V> MF_INLINE V mf_lanewise(F f, V x) {
  if constexpr (mf_traits<V>::paired) return {mf_lanewise(f, x.low), mf_lanewise(f, x.high)};
  else if constexpr (mf_traits<V>::lanes == 1) return f(x);
  else {
    V result;
    for (int i = 0; i < mf_traits<V>::lanes; ++i) result[i] = f(x[i]);
    return result;
  }
}

// Contracted where the machine can; elsewhere two roundings.
template <class V> MF_INLINE V mf_fma(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return __builtin_ia32_vfmaddps512_mask(a, b, c, (uint16_t)-1, 4);
#endif
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return __builtin_ia32_vfmaddps256(a, b, c);
  if constexpr (sizeof(V) == 16) return __builtin_ia32_vfmaddps(a, b, c);
#endif
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  if constexpr (sizeof(V) == 4) return __builtin_fmaf(a, b, c);
#endif
  return a * b + c;
}
// c + x * (...)
template <class V> MF_INLINE V mf_polynomial(V, float c) { return mf_all<V>(c); }
template <class V, class... C> MF_INLINE V mf_polynomial(V x, float c, C... more) {
  return mf_fma(mf_polynomial(x, more...), x, mf_all<V>(c));
}
template <class V> MF_INLINE V mf_magnitude(V x) {
  return mf_bits<float>(mf_bits<uint32_t>(x) & 0x7fffffffu);
}
template <class V> MF_INLINE V mf_with_sign_of(V magnitude, V sign) {
  return mf_bits<float>(mf_bits<uint32_t>(magnitude) | (mf_bits<uint32_t>(sign) & 0x80000000u));
}

template <class T> constexpr bool mf_is_floating = (T)0.5 != (T)0;
template <class T> struct mf_integer_of_width { typedef int32_t type; };
template <> struct mf_integer_of_width<double> { typedef int64_t type; };
template <class V> MF_INLINE V mf_absolute(V x) {
  return mf_map([](auto v) {
    typedef decltype(v) R;
    typedef mf_element<R> T;
    if constexpr (mf_is_floating<T>) {
      typedef typename mf_integer_of_width<T>::type I;
      constexpr I rest = (I)(~((I)1 << (sizeof(I) * 8 - 1)));  // all bits but the sign
      typedef mf_tile<I, mf_traits<R>::lanes> B;
      return mf_bits<T>((B)(mf_bits<I>(v) & mf_all<B>(rest)));
    } else {
      return v < mf_all<R>(0) ? -v : v;
    }
  }, x);
}

template <class V> MF_INLINE V mf_sqrt_vector(V x) {
  constexpr bool single = sizeof(mf_element<V>) == 4;
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64 && single)
    return __builtin_ia32_sqrtps512_mask(x, x, (uint16_t)-1, 4);
  if constexpr (sizeof(V) == 64 && !single)
    return __builtin_ia32_sqrtpd512_mask(x, x, (uint8_t)-1, 4);
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32 && single) return __builtin_ia32_sqrtps256(x);
  if constexpr (sizeof(V) == 32 && !single) return __builtin_ia32_sqrtpd256(x);
#endif
  return mf_lanewise([](mf_element<V> lane) -> mf_element<V> {
    if constexpr (single) return __builtin_sqrtf(lane);
    else return __builtin_sqrt(lane);
  }, x);
}
template <class V> MF_INLINE V mf_sqrt(V x) {
  return mf_map([](auto v) { return mf_sqrt_vector(v); }, x);
}
template <class V> MF_INLINE V mf_reciprocal(V x) {
  return mf_map([](auto v) { return mf_all<decltype(v)>(1) / v; }, x);
}
template <class V> MF_INLINE V mf_rsqrt(V x) {
  return mf_map([](auto v) { return mf_all<decltype(v)>(1) / mf_sqrt_vector(v); }, x);
}

// exp(x) = 2^n exp(r) with |r| <= ln(2)/2. 2^n is applied in two factors, so that neither overflows and
// results below the smallest normal number are rounded once.
template <class V> MF_INLINE V mf_exp_float(V x) {
  V y = x < mf_all<V>(-105.0f) ? mf_all<V>(-105.0f) : x;
  y = y > mf_all<V>(89.0f) ? mf_all<V>(89.0f) : y;
  const V magic = mf_all<V>(12582912.0f);  // 1.5 * 2^23: the sum's last place is 1
  const V shifted = mf_fma(y, mf_all<V>(1.44269504f), magic);
  const V n = shifted - magic;
  V r = mf_fma(n, mf_all<V>(-0x1.62e4p-1f), y);
  r = mf_fma(n, mf_all<V>(-0x1.7f7d1cp-20f), r);
  const V p = mf_polynomial(r, 5.000000000e-01f, 1.666651815e-01f, 4.166620225e-02f,
                            8.368969895e-03f, 1.395062893e-03f);
  const V e = mf_all<V>(1.0f) + mf_fma(r * r, p, r);
  const auto exponent = mf_bits<int32_t>(shifted) - 0x4b400000;
  const auto half = exponent >> 1;
  const V low = mf_bits<float>((decltype(half))((half + 127) << 23));
  const V high = mf_bits<float>((decltype(half))((exponent - half + 127) << 23));
  return e * low * high;
}

// Near 0 an odd polynomial; elsewhere 1 - 2 / (1 + exp(2 |x|)).
template <class V> MF_INLINE V mf_tanh_float(V x) {
  const V size = mf_magnitude(x);
  const V square = x * x;
  const V p = mf_polynomial(square, -3.333329856e-01f, 1.333195865e-01f, -5.378668010e-02f,
                            2.080537751e-02f, -5.905860569e-03f);
  const V near = mf_fma(square * size, p, size);
  const V one = mf_all<V>(1.0f);
  const V far = one - mf_all<V>(2.0f) / (one + mf_exp_float(size + size));
  return mf_with_sign_of(size < mf_all<V>(0.6f) ? near : far, x);
}

// Near 0 an odd polynomial; elsewhere 1 - exp(q(|x|)) with q fitted to log(erfc), which is beyond
// single precision from 4 on.
template <class V> MF_INLINE V mf_erf_float(V x) {
  const V size = mf_magnitude(x);
  const V near = mf_fma(
      mf_polynomial(x * x, 1.283791661e-01f, -3.761263490e-01f, 1.128369421e-01f,
                    -2.685927041e-02f, 5.200634245e-03f, -8.137436234e-04f, 8.345221431e-05f),
      size, size);
  const V clamped = size > mf_all<V>(4.0f) ? mf_all<V>(4.0f) : size;
  const V q = mf_polynomial(clamped, -2.113040246e-04f, -1.127611279e+00f, -6.372903585e-01f,
                            -1.038369685e-01f, 2.218141966e-02f, -3.031828674e-03f,
                            1.947786513e-04f);
  const V far = mf_all<V>(1.0f) - mf_exp_float(q);
  return mf_with_sign_of(size < mf_all<V>(0.93f) ? near : far, x);
}

// x = 2^n m with m in [sqrt(1/2), sqrt(2)); log(1 + f) = f - f^2/2 + f^3 p(f) with f = m - 1. Subnormal
// numbers are scaled first. n log(2) is added in two parts, the larger one exact.
template <class V> MF_INLINE V mf_log_float(V x) {
  typedef mf_tile<int32_t, mf_traits<V>::lanes> I;
  const auto tiny = x < mf_all<V>(0x1p-126f);
  const V scaled = tiny ? x * mf_all<V>(0x1p23f) : x;
  const I bits = mf_bits<int32_t>(scaled);
  const I shifted = bits - mf_all<I>(0x3f3504f3);  // the bits of sqrt(1/2)
  const I exponent = (shifted >> 23) - (tiny ? mf_all<I>(23) : mf_all<I>(0));
  const V f = mf_bits<float>((I)(bits - (shifted & mf_all<I>(-0x800000)))) - mf_all<V>(1.0f);
  const V n = mf_convert<float>(exponent);
  const V p = mf_polynomial(f, 3.333331260e-01f, -2.500000960e-01f, 2.000211873e-01f,
                            -1.666799567e-01f, 1.421955091e-01f, -1.240559142e-01f,
                            1.188817460e-01f, -1.167564130e-01f, 6.746601328e-02f);
  const V square = f * f;
  V low = mf_fma(square * f, p, n * mf_all<V>(-2.12194440e-4f));
  low = mf_fma(square, mf_all<V>(-0.5f), low);
  const V finite = mf_fma(n, mf_all<V>(0.693359375f), f + low);
  const V infinity = mf_all<V>(__builtin_inff());
  const V ends = x == mf_all<V>(0.0f) ? -infinity : x == infinity ? x : mf_all<V>(__builtin_nanf(""));
  return (x > mf_all<V>(0.0f)) & (x < infinity) ? finite : ends;
}

// sin for first = 0, cos for first = 1. x - n pi/2 is taken in double precision, where the product with
// the first part of pi/2 is exact up to |n| = 2^20: for arguments no larger than that.
template <int first, class V> MF_INLINE V mf_circular_float(V x) {
  typedef mf_tile<double, mf_traits<V>::lanes> D;
  const D wide = mf_convert<double>(x);
  const D magic = mf_all<D>(6755399441055744.0);  // 1.5 * 2^52: the sum's last place is 1
  const D shifted = wide * mf_all<D>(0.63661977236758134308) + magic;
  const D n = shifted - magic;
  const V r = mf_convert<float>(wide - n * mf_all<D>(0x1.921fb544p+0) -
                                n * mf_all<D>(0x1.0b4611a626331p-34));
  const auto quadrant = mf_convert<int32_t>(mf_bits<int64_t>(shifted)) + first;
  const V square = r * r;
  const V sine = mf_fma(square * r, mf_polynomial(square, -1.666666664e-01f, 8.333329280e-03f,
                                                  -1.983930440e-04f, 2.718046387e-06f), r);
  const V cosine = mf_fma(square * square, mf_polynomial(square, 4.166664555e-02f,
                                                         -1.388730985e-03f, 2.443241111e-05f),
                          mf_fma(square, mf_all<V>(-0.5f), mf_all<V>(1.0f)));
  const V size = (quadrant & 1) != 0 ? cosine : sine;
  return (quadrant & 2) != 0 ? -size : size;
}
// Where a lane is larger, or not finite, libm does them all. sin keeps the sign of -0.
template <class V> MF_INLINE V mf_sin_float(V x) {
  const V size = mf_magnitude(x);
  if (__builtin_expect(mf_any_lane(mf_not(size <= mf_all<V>(1e6f))), 0))
    return mf_lanewise([](float lane) { return __builtin_sinf(lane); }, x);
  return size < mf_all<V>(1e-4f) ? x : mf_circular_float<0>(x);
}
template <class V> MF_INLINE V mf_cos_float(V x) {
  if (__builtin_expect(mf_any_lane(mf_not(mf_magnitude(x) <= mf_all<V>(1e6f))), 0))
    return mf_lanewise([](float lane) { return __builtin_cosf(lane); }, x);
  return mf_circular_float<1>(x);
}

// In double precision libm's scalar functions do the work, lane by lane.
#define MF_FUNCTION(name)                                                                       \
  template <class V> MF_INLINE V mf_##name(V x) {                                               \
    if constexpr (sizeof(mf_element<V>) == 8)                                                   \
      return mf_lanewise([](double lane) { return __builtin_##name(lane); }, x);                \
    else return mf_map([](auto v) { return mf_##name##_float(v); }, x);                         \
  }
MF_FUNCTION(exp)
MF_FUNCTION(log)
MF_FUNCTION(sin)
MF_FUNCTION(cos)
MF_FUNCTION(tanh)
MF_FUNCTION(erf)

// 1 / (1 + exp(-x)), without overflow.
template <class V> MF_INLINE V mf_sigmoid(V x) {
  const V e = mf_exp(-mf_absolute(x));
  const V one = mf_all<V>(1);
  return mf_select<V>(mf_less(x, mf_all<V>(0)), e, one) / (one + e);
}
template <class V> MF_INLINE V mf_silu(V x) { return x / (mf_all<V>(1) + mf_exp(-x)); }

template <class V> MF_INLINE V mf_gelu(V x) {
  const V half = mf_all<V>((mf_element<V>)0.5);
  const V inner = x * mf_all<V>((mf_element<V>)0.70710678118654752440);
  return x * half * (mf_all<V>(1) + mf_erf(inner));
}
template <class V> MF_INLINE V mf_relu(V x) {
  return mf_map([](auto v) { return v < mf_all<decltype(v)>(0) ? mf_all<decltype(v)>(0) : v; }, x);
}
// A function of two scalars on each lane.
template <class F, class V> MF_INLINE V mf_lanewise(F f, V a, V b) {
  return mf_zip([f](auto x, auto y) {
    typedef decltype(x) R;
    if constexpr (mf_traits<R>::lanes == 1) {
      return f(x, y);
    } else {
      R result;
      for (int i = 0; i < mf_traits<R>::lanes; ++i) result[i] = f(x[i], y[i]);
      return result;
    }
  }, a, b);
}
// Integers, towards zero. What would trap is defined: x / 0 = 0, lowest / -1 = lowest.
template <class T> MF_INLINE T mf_divide_scalars(T a, T b) {
  return b == 0 ? 0 : b == -1 ? -a : a / b;
}
template <class V> MF_INLINE V mf_divide(V a, V b) {
  typedef mf_element<V> T;
  return mf_lanewise([](T x, T y) { return mf_divide_scalars(x, y); }, a, b);
}

// ---------------------------------------------------------------- powers

// log2 of positive finite numbers to about 40 bits: x = 2^n m, and with s = (m - 1) / (m + 1)
// log2(m) = 2 / log(2) * (s + s^3 / 3 + s^5 / 5 + ...).
template <class D> MF_INLINE D mf_log2_double(D x) {
  typedef mf_tile<int64_t, mf_traits<D>::lanes> I;
  const I bits = mf_bits<int64_t>(x);
  const I shifted = bits - mf_all<I>(0x3fe6a09e667f3bcd);  // the bits of sqrt(1/2)
  const D m = mf_bits<double>((I)(bits - (shifted & mf_all<I>(-0x10000000000000))));
  const D s = (m - mf_all<D>(1)) / (m + mf_all<D>(1));
  const D z = s * s;
  D series = mf_all<D>(1.0 / 13);
  series = series * z + mf_all<D>(1.0 / 11);
  series = series * z + mf_all<D>(1.0 / 9);
  series = series * z + mf_all<D>(1.0 / 7);
  series = series * z + mf_all<D>(1.0 / 5);
  series = series * z + mf_all<D>(1.0 / 3);
  series = series * z + mf_all<D>(1);
  return mf_convert<double>((I)(shifted >> 52)) + s * series * mf_all<D>(2.8853900817779268147);
}
// 2^x to about 40 bits, for |x| up to 1000.
template <class D> MF_INLINE D mf_exp2_double(D x) {
  typedef mf_tile<int64_t, mf_traits<D>::lanes> I;
  const D magic = mf_all<D>(6755399441055744.0);
  const D shifted = x + magic;
  const D r = (x - (shifted - magic)) * mf_all<D>(0.69314718055994530942);
  D series = mf_all<D>(1.0 / 3628800);
  series = series * r + mf_all<D>(1.0 / 362880);
  series = series * r + mf_all<D>(1.0 / 40320);
  series = series * r + mf_all<D>(1.0 / 5040);
  series = series * r + mf_all<D>(1.0 / 720);
  series = series * r + mf_all<D>(1.0 / 120);
  series = series * r + mf_all<D>(1.0 / 24);
  series = series * r + mf_all<D>(1.0 / 6);
  series = series * r + mf_all<D>(1.0 / 2);
  series = series * r + mf_all<D>(1);
  series = series * r + mf_all<D>(1);
  const I exponent = (I)(mf_bits<int64_t>(shifted) << 52);  // the integer stands in the last places
  return mf_bits<double>((I)(mf_bits<int64_t>(series) + exponent));
}
// C's pow: 1 where y is 0 or x is 1, whatever the other is.
template <class V> MF_INLINE V mf_pow_float(V x, V y) {
  typedef mf_tile<double, mf_traits<V>::lanes> D;
  const V zero = mf_all<V>(0), one = mf_all<V>(1), infinity = mf_all<V>(__builtin_inff());
  const V size = mf_magnitude(x);
  D exponent = mf_map([](auto v) { return mf_log2_double(v); }, mf_convert<double>(size));
  exponent = mf_select<D>(mf_equal(size, zero), mf_all<D>(-__builtin_inf()), exponent);
  exponent = mf_select<D>(mf_equal(size, infinity), mf_all<D>(__builtin_inf()), exponent);
  exponent = exponent * mf_convert<double>(y);
  exponent = mf_select<D>(mf_less(mf_all<D>(200), exponent), mf_all<D>(200), exponent);
  exponent = mf_select<D>(mf_less(exponent, mf_all<D>(-200)), mf_all<D>(-200), exponent);
  V power = mf_convert<float>(mf_map([](auto v) { return mf_exp2_double(v); }, exponent));
  power = mf_select<V>(mf_equal(size, one), one, power);  // also to an infinite power

  const auto large = mf_less_equal(mf_all<V>(0x1p24f), mf_magnitude(y));  // an even number
  const V small = mf_select<V>(large, zero, y);
  const auto whole = mf_convert<int32_t>(small);
  const auto is_whole = mf_equal(mf_convert<float>(whole), small);
  const auto is_odd = is_whole & mf_nonzero(whole & 1);
  power = mf_select<V>(is_odd, mf_with_sign_of(power, x), power);
  const auto undefined = mf_less(x, zero) & mf_less(size, infinity) & mf_not(is_whole);
  const auto unordered = mf_differ(x, x) | mf_differ(y, y) | undefined;
  power = mf_select<V>(unordered, mf_all<V>(__builtin_nanf("")), power);
  return mf_select<V>(mf_equal(y, zero) | mf_equal(x, one), one, power);
}
// Integers wrap; to a negative power they are 0 but for 1 and -1.
template <class T> MF_INLINE T mf_pow_integer(T x, T y) {
  if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0;
  T power = 1;
  for (; y; y >>= 1, x *= x) power *= y & 1 ? x : 1;
  return power;
}
template <class V> MF_INLINE V mf_pow(V x, V y) {
  typedef mf_element<V> T;
  if constexpr (!mf_is_floating<T>)
    return mf_lanewise([](T a, T b) { return mf_pow_integer(a, b); }, x, y);
  else if constexpr (sizeof(T) == 8)
    return mf_lanewise([](T a, T b) { return __builtin_pow(a, b); }, x, y);
  else
    return mf_zip([](auto a, auto b) { return mf_pow_float(a, b); }, x, y);
}

// ---------------------------------------------------------------- reductions

struct mf_sum {
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const { return a + b; }
};
struct mf_any {
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const { return a | b; }
};
struct mf_all_true {
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const { return a & b; }
};
struct mf_product {
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const { return a * b; }
};
struct mf_maximum {  // NaN wins: a comparison alone would drop it
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const {
    return mf_zip([](auto x, auto y) { return (y > x) | (y != y) ? y : x; }, a, b);
  }
};
struct mf_minimum {
  template <class V> MF_INLINE_MEMBER V operator()(V a, V b) const {
    return mf_zip([](auto x, auto y) { return (y < x) | (y != y) ? y : x; }, a, b);
  }
};
template <class F, class V> MF_INLINE mf_element<V> mf_reduce(F f, V x) {
  if constexpr (mf_traits<V>::lanes == 1) return x;
  else return mf_reduce(f, f(mf_low(x), mf_high(x)));
}

template <class V, class C> struct mf_moments {
  V mean, m2;
  C count;
};
template <class V, class C>
MF_INLINE mf_moments<V, C> mf_welford_step(mf_moments<V, C> old, V x) {
  const V before = mf_convert<mf_element<V>>(old.count);
  const V mean = mf_select<V>(mf_nonzero(before), old.mean, mf_all<V>(0));
  const V delta = x - mean;
  const V next = mean + delta / (before + mf_all<V>(1));
  return {next, old.m2 + delta * (x - next), old.count + mf_all<C>(1)};
}
// Chan, Golub and LeVeque (1979). A side of count 0 has no say, whatever its mean and m2.
template <class V, class C>
MF_INLINE mf_moments<V, C> mf_welford_merge(mf_moments<V, C> a, mf_moments<V, C> b) {
  const V a_count = mf_convert<mf_element<V>>(a.count);
  const V b_count = mf_convert<mf_element<V>>(b.count);
  const auto has_a = mf_nonzero(a_count), has_b = mf_nonzero(b_count);
  const V weight = b_count / mf_select<V>(has_b, a_count + b_count, mf_all<V>(1));
  const V delta = b.mean - a.mean;
  const V mean = a.mean + delta * weight;
  const V m2 = a.m2 + b.m2 + delta * delta * (a_count * weight);
  return {mf_select<V>(has_b, mf_select<V>(has_a, mean, b.mean), a.mean),
          mf_select<V>(has_b, mf_select<V>(has_a, m2, b.m2), a.m2), a.count + b.count};
}
// Over all lanes; the mean of nothing is NaN.
template <class V, class C>
MF_INLINE mf_moments<mf_element<V>, int64_t> mf_welford_reduce(mf_moments<V, C> x) {
  if constexpr (mf_traits<V>::lanes == 1) {
    return {x.count == 0 ? (V)__builtin_nan("") : x.mean, x.m2, x.count};
  } else {
    typedef decltype(mf_low(x.mean)) HalfV;
    typedef decltype(mf_low(x.count)) HalfC;
    return mf_welford_reduce(mf_welford_merge(
        mf_moments<HalfV, HalfC>{mf_low(x.mean), mf_low(x.m2), mf_low(x.count)},
        mf_moments<HalfV, HalfC>{mf_high(x.mean), mf_high(x.m2), mf_high(x.count)}));
  }
}

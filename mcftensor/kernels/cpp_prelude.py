"""What kernels in C++ begin with: functions on vectors of lanes, for each set of instructions."""

from mcftensor.kernels.block_scales import BLOCK_SIZE

BITS = """\
using int32_t = __INT32_TYPE__;
using int64_t = __INT64_TYPE__;
using uint8_t = __UINT8_TYPE__;
using uint16_t = __UINT16_TYPE__;
using uint32_t = __UINT32_TYPE__;
using uint64_t = __UINT64_TYPE__;
#define INLINE static INLINE_METHOD
#define INLINE_METHOD inline __attribute__((always_inline))
template <class To, class From>
INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern in another type has the same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
"""
"""C++ declarations in place of the standard library: integers of a width, and bit casts."""

# By default GCC keeps the order of the text, in which many instructions wait for the one before.
# Conversions of float16 would not fit into registers in another order.
ORDERED = """\
#ifndef __clang__
#pragma GCC optimize ("schedule-insns,no-gcse,sched-pressure")
#endif
"""

PRELUDE = """\
constexpr double inf = __builtin_inf(), nan = __builtin_nan("");

template <class T>
struct Lanes { typedef T type __attribute__((vector_size(sizeof(T) * LANES))); };
using F = Lanes<float>::type;
using D = Lanes<double>::type;
using I = Lanes<int32_t>::type;
using U = Lanes<uint32_t>::type;
using L = Lanes<int64_t>::type;
using UL = Lanes<uint64_t>::type;

template <class V, class T>
INLINE V all(T x) {  // a loop would set one lane after the other
  auto lane = V{}[0];
  lane = x;
  return lane - V{};
}
template <uint32_t X>
INLINE U constant() { return all<U>(X); }
CONSTANTS
template <class V>
INLINE V counted() {
  V y;
  for (int k = 0; k < LANES; ++k) y[k] = k;
  return y;
}
template <class To, class From>
INLINE To to(From x) { return __builtin_convertvector(x, To); }

// Patterns change their width by the instructions that processors have: bytes by way of 16 bits,
// and vectors of 512 bits as shuffles, for which alone compilers find them.
using B = Lanes<uint8_t>::type;
using H = Lanes<uint16_t>::type;
#if defined(__AVX512BW__) && defined(__has_builtin)
#define SHUFFLES __has_builtin(__builtin_shufflevector)
#else
#define SHUFFLES 0
#endif
#if SHUFFLES
typedef uint16_t Twice __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(2 * LANES)));
INLINE U wide(H x) { return as<U>(__builtin_shufflevector(x, H{}, BEFORE_ZEROS)); }
INLINE U wide(B x) { return wide(as<H>(__builtin_shufflevector(x, B{}, BEFORE_ZEROS))); }
INLINE H narrow(U x) {
  Twice y = as<Twice>(x);
  return __builtin_shufflevector(y, y, EACH_SECOND);
}
INLINE B narrow_twice(U x) {
  Bytes y = as<Bytes>(narrow(x));
  return __builtin_shufflevector(y, y, EACH_SECOND);
}
#elif defined(__AVX2__) && !defined(__clang__) && LANES == 8
typedef char Bytes __attribute__((vector_size(32)));
typedef char Half __attribute__((vector_size(16)));
typedef short Shorts __attribute__((vector_size(16)));
typedef long long Words __attribute__((vector_size(32)));
typedef long long Word __attribute__((vector_size(16)));
INLINE U wide(H x) { return as<U>(__builtin_ia32_pmovzxwd256(as<Shorts>(x))); }
INLINE U wide(B x) {
  return as<U>(__builtin_ia32_pmovzxbd256(as<Half>(Word{as<long long>(x), 0})));
}
INLINE H narrow(U x) {  // within each half of the vector, and then the halves together
  constexpr Bytes places = {0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
                            0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1};
  Words y = as<Words>(__builtin_ia32_pshufb256(as<Bytes>(x), places));
  y = __builtin_ia32_permdi256(y, 8);
  return as<H>(Word{y[0], y[1]});
}
INLINE B narrow_twice(U x) {
  constexpr Bytes places = {0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                            -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1};
  Words y = as<Words>(__builtin_ia32_pshufb256(as<Bytes>(x), places));
  y |= __builtin_ia32_permdi256(y, 2);
  return as<B>(y[0]);
}
#else
INLINE U wide(H x) { return to<U>(x); }
INLINE U wide(B x) { return wide(to<H>(x)); }
INLINE H narrow(U x) { return to<H>(x); }
INLINE B narrow_twice(U x) { return to<B>(narrow(x)); }
#endif
struct Whole { constexpr operator int() const { return LANES; } };
template <class V, class T>
INLINE V load(const T *p, int n) {
  typename Lanes<T>::type x = {};
  __builtin_memcpy(&x, p, n * sizeof(T));
  if constexpr (sizeof(T) <= 2) return to<V>(wide(x));
  else return to<V>(x);
}
template <class T, class V>
INLINE void store(T *p, V pattern, int n) {
  auto put = [&](auto x) { __builtin_memcpy(p, &x, n * sizeof(T)); };
  if constexpr (sizeof(T) == 1) put(narrow_twice(to<U>(pattern)));
  else if constexpr (sizeof(T) == 2) put(narrow(to<U>(pattern)));
  else put(to<typename Lanes<T>::type>(pattern));
}

// Of two vectors of 16 bits each, elements in turn: no pattern has to change its place. Bytes gain
// zeros or lose them, of both vectors at once.
typedef uint16_t Pairs __attribute__((vector_size(4 * LANES)));
typedef uint8_t PairsOfBytes __attribute__((vector_size(2 * LANES)));
typedef short SignedPairs __attribute__((vector_size(4 * LANES)));
typedef char Characters __attribute__((vector_size(2 * LANES)));
typedef long long Quarters __attribute__((vector_size(4 * LANES)));
INLINE Pairs in_pairs(Pairs x) { return x; }
INLINE Pairs in_pairs(PairsOfBytes x) {
#if defined(__AVX512BW__) && !defined(__clang__) && LANES == 16
  return as<Pairs>(__builtin_ia32_pmovzxbw512_mask(as<Characters>(x), SignedPairs{}, -1));
#elif defined(__AVX2__) && !defined(__clang__) && LANES == 8
  return as<Pairs>(__builtin_ia32_pmovzxbw256(as<Characters>(x)));
#else
  return to<Pairs>(x);
#endif
}
template <class T>
INLINE U pair(const T *p) {
  typedef T Both __attribute__((vector_size(2 * LANES * sizeof(T))));
  Both both;
  __builtin_memcpy(&both, p, sizeof both);
  return as<U>(in_pairs(both));
}
struct Second {  // the second one's pattern in the last bits, but where these are shifted out
  U both;
  INLINE_METHOD operator U() const { return both >> 16; }
};
template <class T>
INLINE U first_of_pair(const T *p) { return pair(p); }
template <class T>
INLINE Second second_of_pair(const T *p) { return {pair(p)}; }
template <class T>
INLINE U first_alone(const T *p) { return pair(p) & constant<65535u>(); }
template <class T>
INLINE U second_alone(const T *p) { return pair(p) >> 16; }
INLINE U first_of_halves(const uint8_t *p) { return load<U>(p, Whole()) & 15; }
INLINE U second_of_halves(const uint8_t *p) { return load<U>(p, Whole()) >> 4; }
INLINE U paired(U first, U second) {
#if defined(__AVX2__) && !defined(__clang__) && LANES == 8
  return as<U>(__builtin_ia32_pblendw256(
      as<SignedPairs>(first), as<SignedPairs>(second << 16), 0xaa));
#else
  return (first & 0xffff) | second << 16;
#endif
}
INLINE void store_pairs(const void *) {}
template <class... P>
INLINE void store_pairs(uint16_t *p, U first, U second, P... others) {
  U both = paired(first, second);
  __builtin_memcpy(p, &both, sizeof both);
  store_pairs(p + 2 * LANES, others...);
}
#if defined(__AVX2__) && !defined(__clang__) && LANES == 8
template <class... P>
INLINE void store_pairs(uint8_t *p, U a, U b, U c, U d, P... others) {
  SignedPairs first = as<SignedPairs>(paired(a, b) & constant<16711935u>());  // 0xff00ff
  SignedPairs second = as<SignedPairs>(paired(c, d) & constant<16711935u>());
  Quarters every = as<Quarters>(__builtin_ia32_packuswb256(first, second));
  every = __builtin_ia32_permdi256(every, 0xd8);
  __builtin_memcpy(p, &every, sizeof every);
  store_pairs(p + 4 * LANES, others...);
}
#endif
template <class... P>
INLINE void store_pairs(uint8_t *p, U first, U second, P... others) {
  Pairs both = as<Pairs>(paired(first, second));
#if defined(__AVX512BW__) && !defined(__clang__) && LANES == 16
  auto bytes = __builtin_ia32_pmovwb512_mask(as<SignedPairs>(both), Characters{}, -1);
#else
  auto bytes = to<PairsOfBytes>(both);
#endif
  __builtin_memcpy(p, &bytes, sizeof bytes);
  store_pairs(p + 2 * LANES, others...);
}
INLINE void pack_pairs(const void *) {}
template <class... P>
INLINE void pack_pairs(uint8_t *p, U first, U second, P... others) {
  store(p, first | second << 4, Whole());
  pack_pairs(p + LANES, others...);
}

INLINE F quiet(F x) { return x == x ? x : all<F>(nan); }
INLINE D quiet(D x) { return x == x ? x : all<D>(nan); }

// Of a pattern of fewer bits than its lane the others say nothing.
#define INTEGER(name, V, P, value) \\
  INLINE V name##_value(P bits) { return value; } \\
  INLINE P name##_bits(V x) { return as<P>(x); } \\
  INLINE V to_##name(V x) { return name##_value(as<P>(x)); }
INTEGER(int8, I, U, as<I>(bits << 24) >> 24)
INTEGER(uint8, I, U, as<I>(bits & 0xff))
INTEGER(int16, I, U, as<I>(bits << 16) >> 16)
INTEGER(uint16, I, U, as<I>(bits & 0xffff))
INTEGER(int32, I, U, as<I>(bits))
INTEGER(int64, L, UL, as<L>(bits))
INLINE F short_value(U bits) { return as<F>(bits); }
INLINE F float32_value(U bits) { return quiet(as<F>(bits)); }
INLINE U float32_bits(F x) { return as<U>(x); }
INLINE D float64_value(UL bits) { return quiet(as<D>(bits)); }
INLINE UL float64_bits(D x) { return as<UL>(x); }
INLINE I bool_value(U bits) { return as<I>(bits & 0xff) != 0; }
template <class V>
INLINE U bool_bits(V x) { return to<U>(-x); }

INLINE F bfloat16_value(U bits) { return as<F>(bits << 16); }
INLINE F bfloat16_value(Second x) { return as<F>(x.both & constant<4294901760u>()); }
INLINE I int16_value(Second x) { return as<I>(x.both) >> 16; }
INLINE I shifted_byte(U bits) { return as<I>(bits << 24) >> 16; }  // left, of a byte with a sign
INLINE I shifted_byte(Second x) { return as<I>(x.both << 8) >> 16; }
INLINE U bfloat16_bits(F x) { return as<U>(x) >> 16; }
INLINE F to_bfloat16(F x) {  // of a NaN too, whose last bits `quiet` has cleared
  U bits = as<U>(x);
  return as<F>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}
INLINE F leading(F x) {  // the first of two terms; the second may become half of its last bit
  U bits = as<U>(x);
#if defined(__AVX2__) && !defined(__clang__) && LANES == 8
  U half = as<U>(__builtin_ia32_blendvps256(
      as<F>(all<U>(0x7fbfu)), as<F>(all<U>(0x8040u)), as<F>(bits << 15)));
#else
  U half = bits & 0x10000 ? all<U>(0x8040u) : all<U>(0x7fbfu);
#endif
  return as<F>((bits + half) & 0xffff0000);
}

INLINE F float16_value(U bits) {
  U magnitude = (bits & 0x7fff) << 13;
  U normal = magnitude + (112u << 23);
  U subnormal = as<U>(to<F>(bits & 0x7fff) * 0x1p-24f);
  U value = magnitude < (1u << 23) ? subnormal : normal;
  value = magnitude == (31u << 23) ? all<U>(0x7f800000u) : value;
  value = magnitude > (31u << 23) ? all<U>(0x7fc00000u) : value;  // quiet
  return as<F>(value | (bits & 0x8000) << 16);
}
INLINE F to_float16(F x) {
  U bits = as<U>(x);
  U magnitude = bits & 0x7fffffff;
  U normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
  U subnormal = as<U>((as<F>(magnitude) + 0.5f) - 0.5f);
  U value = magnitude < (113u << 23) ? subnormal : normal;
  value = value >= (143u << 23) ? all<U>(0x7f800000u) : value;
  value = magnitude > 0x7f800000u ? all<U>(0x7fc00000u) : value;
  return as<F>(value | (bits & 0x80000000));
}
INLINE U float16_bits(F x) {
  U bits = as<U>(x);
  U magnitude = bits & 0x7fffffff;
  U normal = (magnitude - (112u << 23)) >> 13;
  U subnormal = as<U>(to<I>(as<F>(magnitude) * 0x1p24f));
  U value = magnitude < (113u << 23) ? subnormal : normal;
  value = magnitude == 0x7f800000u ? all<U>(0x7c00u) : value;
  value = magnitude > 0x7f800000u ? all<U>(0x7e00u) : value;
  return value | (bits >> 16 & 0x8000);
}

INLINE F magnitude(F x) { return as<F>(as<I>(x) & 0x7fffffff); }
INLINE D magnitude(D x) { return as<D>(as<L>(x) & 0x7fffffffffffffff); }
template <class V>
INLINE V magnitude(V x) { return x < 0 ? -x : x; }
#if defined(__AVX512DQ__) && !defined(__clang__) && LANES == 16
INLINE F finite_or_zero(F x) {  // of the classes of NaNs and infinities one look is enough
  return __builtin_ia32_movaps512_mask(F{}, x, __builtin_ia32_fpclassps512_mask(x, 0x99, -1));
}
#else
INLINE F finite_or_zero(F x) { return magnitude(x) < float(inf) ? x : all<F>(0); }
#endif
INLINE D finite_or_zero(D x) { return magnitude(x) < inf ? x : all<D>(0); }
INLINE I negative(F x) { return as<I>(x) < 0; }
INLINE L negative(D x) { return as<L>(x) < 0; }
INLINE F copysign(F x, F y) { return as<F>((as<U>(x) & 0x7fffffff) | (as<U>(y) & 0x80000000)); }
INLINE D copysign(D x, D y) {
  return as<D>((as<UL>(x) & 0x7fffffffffffffff) | (as<UL>(y) & 0x8000000000000000));
}
template <class V>
INLINE V greater(V x, V y) {
  V larger = x > y ? x : y;
  larger = y != y ? y : larger;
  return x != x ? x : larger;
}
template <class V>
INLINE V lesser(V x, V y) { return x < y ? x : y; }
INLINE I shifted(I x, int places) { return as<I>(as<U>(x) >> places); }
INLINE L shifted(L x, int places) { return as<L>(as<UL>(x) >> places); }
INLINE F root(F x) {
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_sqrtf(x[k]);
  return x;
}
INLINE D root(D x) {
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_sqrt(x[k]);
  return x;
}
INLINE F fma(F x, F y, F z) {  // GCC may leave a loop over lanes scalar
#if defined(__AVX512F__) && !defined(__clang__) && LANES == 16
  return __builtin_ia32_vfmaddps512_mask(x, y, z, -1, 4);
#elif defined(__FMA__) && !defined(__clang__) && LANES == 8
  return __builtin_ia32_vfmaddps256(x, y, z);
#elif defined(__FMA__) && !defined(__clang__) && LANES == 4
  return __builtin_ia32_vfmaddps(x, y, z);
#else
  for (int k = 0; k < LANES; ++k) x[k] = __builtin_fmaf(x[k], y[k], z[k]);
  return x;
#endif
}
INLINE F noised(F x, I noise) { return as<F>((as<I>(x) + noise) & as<I>(all<U>(0xffff0000))); }
INLINE F near(F x, F number) {  // x rounded to a bfloat16 of the number's binade; of a zero, to +0
  F first = as<F>(as<U>(number) & 0xffff0000);
  return fma(first, all<F>(-65536), fma(first, all<F>(65536), x));
}
template <class V>
INLINE V sign_of(V x) { return (x > 0 ? all<V>(1) : all<V>(0)) - (x < 0 ? all<V>(1) : all<V>(0)); }

template <class V>
INLINE V entered(double x) { return all<V>(x == x ? x : nan); }
template <class V>
INLINE V entered(int64_t x) { return all<V>(x); }

INLINE bool has_sign(I x) {  // in any lane
#if defined(__AVX512F__) && !defined(__clang__) && LANES == 16
  return __builtin_ia32_ptestmd512(x, all<I>(1u << 31), -1);
#elif defined(__AVX2__) && !defined(__clang__) && LANES == 8
  return __builtin_ia32_movmskps256(as<F>(x));
#else
  uint64_t words[(sizeof x + 7) / 8] = {}, any = 0;
  __builtin_memcpy(words, &x, sizeof x);
  for (uint64_t word : words) any |= word;
  return any & 0x8000000080000000;
#endif
}
INLINE F with_zeros(F x, F sum) { return fma(x, all<F>(0), sum); }
INLINE D with_zeros(D x, D sum) { return x * 0 + sum; }
// The numbers times zero: zeros, or NaNs if one of them is infinite or NaN.
template <class V>
INLINE V zeros_of(V x) { return x * 0; }
template <class V, class... W>
INLINE V zeros_of(V x, W... others) { return with_zeros(x, zeros_of(others...)); }
INLINE bool has_nan(F x) {
#if defined(__AVX512F__) && !defined(__clang__) && LANES == 16
  return __builtin_ia32_cmpps512_mask(x, x, 3, -1, 4);
#else
  return has_sign(x != x);
#endif
}
INLINE bool has_nan(D x) { return has_sign(to<I>(x != x)); }
// The least magnitude above zero, in a measure of its bits.
INLINE U least(F x) { return as<U>(x) * 2 - 1; }
template <class... V>
INLINE U least(F x, V... others) { return lesser(least(x), least(others...)); }
INLINE bool has_tiny(U least) { return has_sign(as<I>(least < (6u << 23) ? ~U{} : U{})); }

// A truth value has the width of what was compared, and gets that of what it meets.
template <class V, class M>
INLINE V like(V, M mask) { return to<V>(mask); }
template <class M>
INLINE F choose(M mask, F x, F y) { return to<I>(mask) ? x : y; }
template <class M>
INLINE D choose(M mask, D x, D y) { return to<L>(mask) ? x : y; }
template <class M, class V>
INLINE V choose(M mask, V x, V y) { return to<V>(mask) ? x : y; }
INLINE F zero_of_zero(I code, F x) {  // the code has no sign
#if defined(__AVX2__) && !defined(__clang__) && LANES == 8
  return as<F>(__builtin_ia32_psignd256(as<I>(x), code));
#else
  return choose(code == 0, F{}, x);
#endif
}
"""

# Components that blocks share. A whole block lies in consecutive vectors.
SHARING = (
    f"""\
#define SHARING {BLOCK_SIZE}
"""
    + """\
template <int STEP, class V>
INLINE V largest(V x) {  // of all lanes, in each lane
  if constexpr (STEP == 0) return x;
  else {
#ifdef __clang__
    V y = x;
    for (int k = 0; k < LANES; ++k) y[k] = x[k ^ STEP];
#else
    V y = __builtin_shuffle(x, counted<I>() ^ STEP);
#endif
    return largest<STEP / 2>(x > y ? x : y);
  }
}
struct Every {};  // element counts
INLINE I counts(I, Every) { return ~I{}; }
INLINE I counts(I place, int32_t valid) { return place < valid; }
template <int TOGETHER, class M, class N, class... V>
INLINE I block_max(N valid, V... vectors) {  // the elements from `valid` on count as zeros
  M most = {};
  I place = counted<I>() * TOGETHER;
  int k = 0;
  auto add = [&](M x) { most = most > x ? most : x; };
  ((add(as<M>(vectors & counts(place, valid))),
    place += ++k % TOGETHER ? 1 : TOGETHER * LANES - TOGETHER + 1), ...);
  return as<I>(largest<LANES / 2>(most));
}

// Two codes of four bits in a byte, the first one in its last bits.
INLINE U unpacked(const uint8_t *p) {
  uint32_t words[(LANES + 7) / 8] = {};
  __builtin_memcpy(words, p, LANES / 2);
  U place = counted<U>(), x = all<U>(words[0]);
  if constexpr (LANES > 8) x = place < 8 ? x : all<U>(words[LANES / 16]);
  return x >> (place % 8 * 4) & 15;
}
// The value of a code, from a table if that takes fewer instructions.
template <class... V>
INLINE F entry(I code, F value, F a, F b, F c, F d, F e, F f, F g, F h, V... others) {
#if defined(__AVX512F__) && !defined(__clang__) && LANES == 16
  const F table = {a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0], others[0]...};
  return __builtin_shuffle(table, code);
#elif defined(__AVX2__) && !defined(__clang__) && LANES == 8
  const F first = {a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0]}, second = {others[0]...};
  return __builtin_ia32_blendvps256(
      __builtin_shuffle(first, code), __builtin_shuffle(second, code), as<F>(code << 28));
#else
  return value;
#endif
}
INLINE void pack(uint8_t *p, U pattern) {
  typedef uint64_t Pairs __attribute__((vector_size(4 * LANES)));
  typedef uint8_t Halved __attribute__((vector_size(LANES / 2)));
  Pairs x = as<Pairs>(pattern);
  Halved y = __builtin_convertvector(x | x >> 28, Halved);
  __builtin_memcpy(p, &y, sizeof y);
}
"""
)

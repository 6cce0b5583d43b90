// Vectors of floats for a CPU: AK_LANES of them, and how fp32, fp16 and bf16 elements are read and written.
//
// Included once by each variant's source, inside a namespace of its own, and includes nothing of the standard library:
// an inline function of a standard header that was compiled for AVX-512 could be the one that the linker keeps for all.
//
// bf16 is rounded by integer arithmetic, not by vcvtneps2bf16, which flushes subnormal numbers to 0.

typedef float V __attribute__((vector_size(4 * AK_LANES)));
typedef ak_uint32 U __attribute__((vector_size(4 * AK_LANES)));
typedef ak_uint16 H __attribute__((vector_size(2 * AK_LANES)));

AK_FN V pick(U mask, V a, V b) { return (V)(((U)a & mask) | ((U)b & ~mask)); }
AK_FN U pick(U mask, U a, U b) { return (a & mask) | (b & ~mask); }
AK_FN V larger(V a, V b) { return pick((U)(a > b) | (U)(a != a), a, b); }
AK_FN V first_lanes(V x, ak_int64 n) {
  for (ak_int64 i = n; i < AK_LANES; i++) x[i] = 0.0f;
  return x;
}
AK_FN V magnitude(V a) { return (V)((U)a & 0x7fffffffu); }

#if AK_LANES == 16
AK_FN V root(V x) { return (V)_mm512_sqrt_ps((__m512)x); }
AK_FN V from_f16(H h) { return (V)_mm512_cvtph_ps((__m256i)h); }
AK_FN H to_f16(V x) { return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif AK_LANES == 8
AK_FN V root(V x) { return (V)_mm256_sqrt_ps((__m256)x); }
AK_FN V from_f16(H h) { return (V)_mm256_cvtph_ps((__m128i)h); }
AK_FN H to_f16(V x) { return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
AK_FN V root(V x) {
  for (int i = 0; i < AK_LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
}

AK_FN V from_f16(H h) {
  U bits = __builtin_convertvector(h, U);
  U sign = (bits & 0x8000u) << 16, body = bits & 0x7fffu;
  U normal = (body << 13) + (112u << 23);
  // inf and nan: the largest exponent of fp32.
  normal = pick((U)(body >= 0x7c00u), normal + (112u << 23), normal);
  // A subnormal is its integer times 2^-24.
  V small = __builtin_convertvector(body, V) * 0x1p-24f;
  return (V)(pick((U)(body < 0x400u), (U)small, normal) | sign);
}

AK_FN H to_f16(V x) {
  U bits = (U)x;
  U sign = (bits >> 16) & 0x8000u, body = bits & 0x7fffffffu;
  U result = ((body + 0xfffu + ((body >> 13) & 1u)) >> 13) - (112u << 10);
  // Below 2^-14: one fp32 addition rounds to multiples of 2^-24, the unit of fp16's subnormals.
  V shifted = (V)body + 0.5f;
  result = pick((U)(body < 0x38800000u), (U)shifted - 0x3f000000u, result);
  result = pick((U)(body >= 0x47800000u), (U){} + 0x7c00u, result);
  result = pick((U)(body > 0x7f800000u), ((body >> 13) & 0x3ffu) | 0x7e00u, result);
  return __builtin_convertvector(result | sign, H);
}
#endif

AK_FN V from_bf16(H h) { return (V)(__builtin_convertvector(h, U) << 16); }

AK_FN H to_bf16(V x) {
  U bits = (U)x;
  U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_convertvector(pick((U)(x != x), bits | 0x400000u, rounded) >> 16, H);
}

// Elements of one dtype. `load` and `store` take a whole vector, `load_some` and `store_some` the first n of one.
template <class T>
struct Elements {
  typedef T type;
  template <class W>
  AK_FN W raw(const T* from) {
    W value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  template <class W>
  AK_FN W raw_some(const T* from, ak_int64 n) {
    W value = {};
    for (ak_int64 i = 0; i < n; i++) {
      T one;
      __builtin_memcpy(&one, from + i, sizeof one);
      value[i] = one;
    }
    return value;
  }
  template <class W>
  AK_FN void put(T* to, W value) {
    __builtin_memcpy(to, &value, sizeof value);
  }
  template <class W>
  AK_FN void put_some(T* to, W value, ak_int64 n) {
    for (ak_int64 i = 0; i < n; i++) {
      T one = value[i];
      __builtin_memcpy(to + i, &one, sizeof one);
    }
  }
};

struct F32 : Elements<float> {
  AK_FN V load(const float* from) { return raw<V>(from); }
  AK_FN V load_some(const float* from, ak_int64 n) { return raw_some<V>(from, n); }
  AK_FN void store(float* to, V x) { put(to, x); }
  AK_FN void store_some(float* to, V x, ak_int64 n) { put_some(to, x, n); }
};

struct F16 : Elements<ak_uint16> {
  AK_FN V load(const ak_uint16* from) { return from_f16(raw<H>(from)); }
  AK_FN V load_some(const ak_uint16* from, ak_int64 n) { return from_f16(raw_some<H>(from, n)); }
  AK_FN void store(ak_uint16* to, V x) { put(to, to_f16(x)); }
  AK_FN void store_some(ak_uint16* to, V x, ak_int64 n) { put_some(to, to_f16(x), n); }
};

struct BF16 : Elements<ak_uint16> {
  AK_FN V load(const ak_uint16* from) { return from_bf16(raw<H>(from)); }
  AK_FN V load_some(const ak_uint16* from, ak_int64 n) { return from_bf16(raw_some<H>(from, n)); }
  AK_FN void store(ak_uint16* to, V x) { put(to, to_bf16(x)); }
  AK_FN void store_some(ak_uint16* to, V x, ak_int64 n) { put_some(to, to_bf16(x), n); }
};

// Nothing is written.
struct Nothing {
  typedef float type;
  AK_FN void store(float*, V) {}
  AK_FN void store_some(float*, V, ak_int64) {}
};

// A whole vector where ALL, else the first n of one: one loop body compiles for both.
template <class E, bool ALL>
AK_FN V load(const typename E::type* from, ak_int64 n) {
  if (ALL) return E::load(from);
  return E::load_some(from, n);
}

template <class E, bool ALL>
AK_FN void store(typename E::type* to, V x, ak_int64 n) {
  if (ALL) E::store(to, x);
  else E::store_some(to, x, n);
}

// The body is a copy that nothing points to: its numbers stay in registers, whatever the loop writes.
//
// Calls body.at<ALL>(i, n) for each vector of `count` elements, the last of which may be shorter.
template <class Body>
AK_FN void each_vector(ak_int64 count, const Body body) {
  ak_int64 i = 0;
  for (; i + AK_LANES <= count; i += AK_LANES) body.template at<true>(i, AK_LANES);
  if (i < count) body.template at<false>(i, count - i);
}

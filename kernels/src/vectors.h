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

// Elements of a dtype that is known when the kernels are compiled, or of AK_ANY: then `kept` is it. The combinations of
// dtypes that most calls have get a loop each; one loop, which branches at each vector, serves all the others.
const ak_int32 AK_ANY = -2;

template <ak_int32 DTYPE>
struct Elements {
  char* data;  // NULL where there are none, and the dtype is AK_NO_DTYPE
  ak_int32 kept;

  Elements(const void* first, ak_int32 dtype, ak_int64 begin)
      : data(first ? (char*)first + begin * (dtype == AK_F32 ? 4 : 2) : nullptr), kept(dtype) {}

  __attribute__((always_inline)) inline ak_int32 dtype() const {
    if (DTYPE != AK_ANY) return DTYPE;
    ak_int32 now = kept;
    // Keeps the compiler from making a loop of its own for each dtype.
    __asm__("" : "+r"(now));
    return now;
  }
};

// A whole vector where ALL, else the first n of one, and 0 behind them: one loop body compiles for both.
template <bool ALL, class W, class T>
AK_FN W raw(const T* from, ak_int64 n) {
  W value = {};
  __builtin_memcpy(&value, from, ALL ? sizeof value : n * sizeof(T));
  return value;
}

template <bool ALL, class W, class T>
AK_FN void put(T* to, W value, ak_int64 n) {
  __builtin_memcpy(to, &value, ALL ? sizeof value : n * sizeof(T));
}

template <bool ALL>
AK_FN V load(const float* from, ak_int64 i, ak_int64 n) {
  return raw<ALL, V>(from + i, n);
}

template <bool ALL, ak_int32 DTYPE>
AK_FN V load(const Elements<DTYPE>& from, ak_int64 i, ak_int64 n) {
  ak_int32 dtype = from.dtype();
  if (dtype == AK_F32) return raw<ALL, V>((const float*)from.data + i, n);
  H bits = raw<ALL, H>((const ak_uint16*)from.data + i, n);
  return dtype == AK_BF16 ? from_bf16(bits) : from_f16(bits);
}

template <bool ALL>
AK_FN void store(float* to, ak_int64 i, V x, ak_int64 n) {
  put<ALL>(to + i, x, n);
}

template <bool ALL, ak_int32 DTYPE>
AK_FN void store(const Elements<DTYPE>& to, ak_int64 i, V x, ak_int64 n) {
  ak_int32 dtype = to.dtype();
  if (dtype == AK_F32) put<ALL>((float*)to.data + i, x, n);
  else if (dtype == AK_BF16) put<ALL>((ak_uint16*)to.data + i, to_bf16(x), n);
  else if (dtype == AK_F16) put<ALL>((ak_uint16*)to.data + i, to_f16(x), n);
}

// Less than 16 elements. Out of the loop's way, and given a copy: what the loop keeps in registers has no address.
template <class Body>
__attribute__((noinline, cold)) Body last_vectors(Body body, ak_int64 i, ak_int64 count) {
  for (; i < count; i += AK_LANES) body.template at<false>(i, count - i < AK_LANES ? count - i : AK_LANES);
  return body;
}

// Calls body.at<ALL>(i, n) for each vector of `count` elements, the last of which may be shorter; returns the body.
//
// By 16 elements at once, so that a body of sums by 16 lanes has each lane in a register.
template <class Body>
AK_FN Body each_vector(ak_int64 count, Body body) {
  ak_int64 i = 0;
  for (; i + 16 <= count; i += 16)
    for (int part = 0; part < 16; part += AK_LANES) body.template at<true>(i + part, AK_LANES);
  if (i < count) return last_vectors(body, i, count);
  return body;
}

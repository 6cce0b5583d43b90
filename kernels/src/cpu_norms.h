// The backward of norms, and statistics of channels, on a CPU. Included by cpu_kernels.h, within its namespace.

// Sums in fp32 by 16 lanes, as `Squares` has them.
struct Sums {
  V lanes[16 / AK_LANES];

  template <bool ALL>
  __attribute__((always_inline)) inline void add(ak_int64 i, V x, ak_int64 n) {
    if (!ALL) x = first_lanes(x, n);
    lanes[(i & 15) / AK_LANES] += x;
  }

  double sum() const {
    double all = 0.0;
    for (int i = 0; i < 16; i++) all += (double)lanes[i / AK_LANES][i % AK_LANES];
    return all;
  }
};

// -- backward of norms --

// The first read of a row: its sums, and its share in those over rows.
template <ak_int32 G, ak_int32 X, bool WEIGHTED, bool SUMMED>
struct NormSumsBody {
  NormRow row;
  Elements<G> grad;
  Elements<X> in;
  const float* weight;
  float *of_weight, *of_bias;
  Sums of_g, of_product;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V dy = load<ALL>(grad, i, n), x = normalised<V>(row, load<ALL>(in, i, n)), product = dy * x;
    if (SUMMED) {
      store<ALL>(of_weight, i, load<ALL>(of_weight, i, n) + product, n);
      store<ALL>(of_bias, i, load<ALL>(of_bias, i, n) + dy, n);
    }
    if (WEIGHTED) {
      V w = load<ALL>(weight, i, n);
      dy = dy * w, product = dy * x;
    }
    of_g.template add<ALL>(i, dy, n);
    of_product.template add<ALL>(i, product, n);
  }
};

// The second, of what a cache has.
template <ak_int32 G, ak_int32 X, bool WEIGHTED>
struct NormBody {
  NormRow row;
  Elements<G> grad;
  Elements<X> in, out;
  const float* weight;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V g = load<ALL>(grad, i, n);
    if (WEIGHTED) g = g * load<ALL>(weight, i, n);
    store<ALL>(out, i, norm_gradient<V>(row, load<ALL>(in, i, n), g), n);
  }
};

template <ak_int32 G, ak_int32 X, bool WEIGHTED, bool SUMMED>
void norm_rows(const ak_norm_args& a, ak_int64 block) {
  ak_int64 from = block * a.rows_at_once, to = from + a.rows_at_once < a.rows ? from + a.rows_at_once : a.rows;
  float* of_weight = SUMMED ? a.partial + 2 * block * a.columns : nullptr;
  float* of_bias = SUMMED ? of_weight + a.columns : nullptr;
  if (SUMMED) __builtin_memset(of_weight, 0, 2 * a.columns * sizeof(float));
  for (ak_int64 r = from; r < to; r++) {
    NormRow row = norm_row(a, r);
    double of_g = 0.0, of_product = 0.0;
    for (ak_int64 i = 0; i < a.columns; i += BLOCK) {
      ak_int64 left = a.columns - i, at = r * a.columns + i;
      NormSumsBody<G, X, WEIGHTED, SUMMED> done =
          each_vector(left < BLOCK ? left : BLOCK, NormSumsBody<G, X, WEIGHTED, SUMMED>{
            row, Elements<G>(a.grad, a.grad_dtype, at), Elements<X>(a.in, a.in_dtype, at),
            WEIGHTED ? a.weight + i : nullptr, SUMMED ? of_weight + i : nullptr, SUMMED ? of_bias + i : nullptr,
            {}, {}});
      of_g += done.of_g.sum(), of_product += done.of_product.sum();
    }
    if (!a.grad_in) continue;
    norm_means(a, row, of_g, of_product);
    ak_int64 at = r * a.columns;
    each_vector(a.columns, NormBody<G, X, WEIGHTED>{
      row, Elements<G>(a.grad, a.grad_dtype, at), Elements<X>(a.in, a.in_dtype, at),
      Elements<X>(a.grad_in, a.in_dtype, at), a.weight});
  }
}

template <ak_int32 G, ak_int32 X>
int norm_of(const ak_norm_args& a, ak_int64 from, ak_int64 to) {
  for (ak_int64 block = from; block < to; block++) {
    if (a.weight) a.partial ? norm_rows<G, X, true, true>(a, block) : norm_rows<G, X, true, false>(a, block);
    else a.partial ? norm_rows<G, X, false, true>(a, block) : norm_rows<G, X, false, false>(a, block);
  }
  return AK_OK;
}

int norm(const void* args, ak_int64 from, ak_int64 to) {
  const ak_norm_args& a = *(const ak_norm_args*)args;
  if (!is_float(a.grad_dtype) || !is_float(a.in_dtype)) return AK_WRONG_DTYPE;
#define AK_TRY(GRAD, IN) \
  if (a.grad_dtype == GRAD && a.in_dtype == IN) return norm_of<GRAD, IN>(a, from, to);
  AK_TRY(AK_F32, AK_F32)
  AK_TRY(AK_BF16, AK_BF16)
  AK_TRY(AK_F16, AK_F16)
#undef AK_TRY
  return norm_of<AK_ANY, AK_ANY>(a, from, to);
}

// The sums over rows of some columns, from those of blocks; grad_weight's columns come first, then grad_bias's.
void sum_columns(const ak_norm_args& a, ak_int64 from, ak_int64 count) {
  double all[AK_SUMMED] = {};
  for (ak_int64 block = 0; block * a.rows_at_once < a.rows; block++) {
    const float* part = a.partial + 2 * block * a.columns + from;
    for (ak_int64 i = 0; i < count; i++) all[i] += (double)part[i];
  }
  for (ak_int64 i = 0; i < count; i++) {
    ak_int64 at = from + i;
    float* to = at < a.columns ? a.grad_weight : a.grad_bias;
    if (to) to[at < a.columns ? at : at - a.columns] = (float)all[i];
  }
}

// Chunks are AK_SUMMED columns of the two sums.
int norm_sums(const void* args, ak_int64 from, ak_int64 to) {
  const ak_norm_args& a = *(const ak_norm_args*)args;
  for (ak_int64 chunk = from; chunk < to; chunk++) {
    ak_int64 at = chunk * AK_SUMMED, left = 2 * a.columns - at;
    sum_columns(a, at, left < AK_SUMMED ? left : AK_SUMMED);
  }
  return AK_OK;
}

// -- statistics of channels --

template <ak_int32 X>
struct SumBody {
  Elements<X> in;
  Sums sums;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    sums.template add<true>(i, load<ALL>(in, i, n), n);
  }
};

template <ak_int32 X>
struct DeviationBody {
  float mean;
  Elements<X> in;
  Sums deviations, squares;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V apart = load<ALL>(in, i, n) - mean;
    if (!ALL) apart = first_lanes(apart, n);
    deviations.template add<true>(i, apart, n);
    squares.template add<true>(i, apart * apart, n);
  }
};

// Of `count` elements whose deviations from a number near their mean are known.
AK_FN Moments moments_of(double count, float near, double deviations, double squares) {
  return Moments{count, (double)near + deviations / count, squares - deviations * (deviations / count)};
}

// Rows of a channel that a cache holds, up to BLOCK elements or one part of a row.
template <ak_int32 X>
struct Rows {
  const ak_statistics_args& a;
  ak_int64 channel, first, last, begin, count;  // rows [first, last), elements [begin, begin + count) of each

  Elements<X> row(ak_int64 n) const { return Elements<X>(a.in, a.in_dtype, (n * a.channels + channel) * a.inner + begin); }

  Moments moments() const {
    // Lanes go on from row to row: to add them up for each would cost more than the rows, where those are short.
    Sums sums = {}, deviations = {}, squares = {};
    double all = (double)((last - first) * count);
    for (ak_int64 n = first; n < last; n++) sums = each_vector(count, SumBody<X>{row(n), sums}).sums;
    float mean = (float)(sums.sum() / all);
    for (ak_int64 n = first; n < last; n++) {
      DeviationBody<X> done = each_vector(count, DeviationBody<X>{mean, row(n), deviations, squares});
      deviations = done.deviations, squares = done.squares;
    }
    return moments_of(all, mean, deviations.sum(), squares.sum());
  }
};

// One channel, of rows [from, to).
template <ak_int32 X>
void channel_moments(const ak_statistics_args& a, ak_int64 channel, ak_int64 from, ak_int64 to, double* moments) {
  Moments all = {0.0, 0.0, 0.0};
  ak_int64 rows = a.inner < BLOCK ? BLOCK / a.inner : 1;
  for (ak_int64 n = from; n < to; n += rows) {
    ak_int64 last = n + rows < to ? n + rows : to;
    for (ak_int64 begin = 0; begin < a.inner; begin += BLOCK) {
      ak_int64 left = a.inner - begin;
      put_together(all, Rows<X>{a, channel, n, last, begin, left < BLOCK ? left : BLOCK}.moments());
    }
  }
  moments[0] = all.count, moments[1] = all.mean, moments[2] = all.squares;
}

const ak_int64 ROWS = 128;

template <ak_int32 X>
struct SideSumBody {
  Elements<X> in;
  float* sums;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    store<ALL>(sums, i, load<ALL>(sums, i, n) + load<ALL>(in, i, n), n);
  }
};

template <ak_int32 X>
struct SideDeviationBody {
  Elements<X> in;
  const float* mean;
  float *deviations, *squares;

  template <bool ALL>
  __attribute__((always_inline)) inline void at(ak_int64 i, ak_int64 n) {
    V apart = load<ALL>(in, i, n) - load<ALL>(mean, i, n);
    store<ALL>(deviations, i, load<ALL>(deviations, i, n) + apart, n);
    store<ALL>(squares, i, load<ALL>(squares, i, n) + apart * apart, n);
  }
};

// Up to AK_SIDE_BY_SIDE channels whose elements lie side by side (inner is 1), of rows [from, to).
template <ak_int32 X>
void side_moments(const ak_statistics_args& a, ak_int64 channel, ak_int64 count, ak_int64 from, ak_int64 to,
                  double* moments) {
  Moments all[AK_SIDE_BY_SIDE] = {};
  for (ak_int64 first = from; first < to; first += ROWS) {
    ak_int64 last = first + ROWS < to ? first + ROWS : to;
    double rows = (double)(last - first);
    float mean[AK_SIDE_BY_SIDE] = {}, deviations[AK_SIDE_BY_SIDE] = {}, squares[AK_SIDE_BY_SIDE] = {};
    for (ak_int64 n = first; n < last; n++)
      each_vector(count, SideSumBody<X>{Elements<X>(a.in, a.in_dtype, n * a.channels + channel), mean});
    for (ak_int64 c = 0; c < count; c++) mean[c] = (float)((double)mean[c] / rows);
    for (ak_int64 n = first; n < last; n++)
      each_vector(count, SideDeviationBody<X>{
        Elements<X>(a.in, a.in_dtype, n * a.channels + channel), mean, deviations, squares});
    for (ak_int64 c = 0; c < count; c++)
      put_together(all[c], moments_of(rows, mean[c], (double)deviations[c], (double)squares[c]));
  }
  for (ak_int64 c = 0; c < count; c++)
    moments[3 * c] = all[c].count, moments[3 * c + 1] = all[c].mean, moments[3 * c + 2] = all[c].squares;
}

// A chunk is one channel, or AK_SIDE_BY_SIDE of them where inner is 1, of one piece.
template <ak_int32 X>
int statistics_of(const ak_statistics_args& a, ak_int64 from, ak_int64 to) {
  ak_int64 at_once = a.inner == 1 ? AK_SIDE_BY_SIDE : 1, units = (a.channels + at_once - 1) / at_once;
  for (ak_int64 chunk = from; chunk < to; chunk++) {
    ak_int64 piece = chunk / units, channel = chunk % units * at_once, left = a.channels - channel;
    ak_int64 begin = a.outer * piece / a.pieces, end = a.outer * (piece + 1) / a.pieces;
    double* moments = a.partial + 3 * (piece * a.channels + channel);
    if (a.inner == 1) side_moments<X>(a, channel, left < at_once ? left : at_once, begin, end, moments);
    else channel_moments<X>(a, channel, begin, end, moments);
  }
  return AK_OK;
}

int statistics(const void* args, ak_int64 from, ak_int64 to) {
  const ak_statistics_args& a = *(const ak_statistics_args*)args;
  if (a.in_dtype == AK_F32) return statistics_of<AK_F32>(a, from, to);
  if (a.in_dtype == AK_BF16) return statistics_of<AK_BF16>(a, from, to);
  return a.in_dtype == AK_F16 ? statistics_of<AK_F16>(a, from, to) : AK_WRONG_DTYPE;
}

// The backward of norms, and statistics of channels, in CUDA. Included by cuda_kernels.cu.

// -- backward of norms --

template <class G, class X, int N>
AK_FN void norm_elements(
    const ak_norm_args& a, const NormRow& row, ak_int64 at, ak_int64 i, float (&g)[N], float (&x)[N]) {
  float w[N];
  G::load((const typename G::type*)a.grad + at + i, g), X::load((const typename X::type*)a.in + at + i, x);
  if (!a.weight) return;
  F32::load(a.weight + i, w);
#pragma unroll
  for (int j = 0; j < N; j++) g[j] = g[j] * w[j];
}

// What a thread does of a row: its sums, then its gradients.
template <class G, class X>
struct NormThread {
  const ak_norm_args& a;
  NormRow row;
  ak_int64 at;
  float of_g, of_product;

  template <int N>
  AK_FN void sum(ak_int64 i) {
    float g[N], x[N];
    norm_elements<G, X, N>(a, row, at, i, g, x);
#pragma unroll
    for (int j = 0; j < N; j++) of_g += g[j], of_product += g[j] * normalised<float>(row, x[j]);
  }

  template <int N>
  AK_FN void write(ak_int64 i) {
    float g[N], x[N];
    norm_elements<G, X, N>(a, row, at, i, g, x);
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = norm_gradient<float>(row, x[j], g[j]);
    X::store((typename X::type*)a.grad_in + at + i, x);
  }
};

// A warp does a row of few columns, a block one of many.
template <class G, class X>
AK_FN void norm_block(const ak_norm_args& a) {
  __shared__ double sums[AK_WARPS][2];
  int warps = a.columns <= AK_NORM_COLUMNS ? 1 : AK_WARPS, warp = threadIdx.x / AK_WARP;
  int threads = warps * AK_WARP, thread = threadIdx.x % threads;
  ak_int64 r = (ak_int64)blockIdx.x * (AK_WARPS / warps) + threadIdx.x / threads;
  bool inside = r < a.rows;
  NormThread<G, X> mine = {a, inside ? norm_row(a, r) : NormRow{}, r * a.columns, 0.0f, 0.0f};
  bool in_groups = a.columns % AK_LANES == 0 && aligned<G>((const typename G::type*)a.grad) &&
                   aligned<X>((const typename X::type*)a.in) && aligned<X>((const typename X::type*)a.grad_in) &&
                   aligned<F32>(a.weight);
  ak_int64 groups = inside && in_groups ? a.columns / AK_LANES : 0, count = inside ? a.columns : 0;
  for (ak_int64 i = thread; i < groups; i += threads) mine.template sum<AK_LANES>(i * AK_LANES);
  for (ak_int64 i = groups * AK_LANES + thread; i < count; i += threads) mine.template sum<1>(i);
  double of_g = mine.of_g, of_product = mine.of_product;
  for (int offset = AK_WARP / 2; offset; offset /= 2) {
    of_g += __shfl_down_sync(0xffffffffu, of_g, offset);
    of_product += __shfl_down_sync(0xffffffffu, of_product, offset);
  }
  if (threadIdx.x % AK_WARP == 0) sums[warp][0] = of_g, sums[warp][1] = of_product;
  __syncthreads();
  of_g = of_product = 0.0;
  int first = warp - warp % warps;
  for (int one = first; one < first + warps; one++) of_g += sums[one][0], of_product += sums[one][1];
  norm_means(a, mine.row, of_g, of_product);
  for (ak_int64 i = thread; i < groups; i += threads) mine.template write<AK_LANES>(i * AK_LANES);
  for (ak_int64 i = groups * AK_LANES + thread; i < count; i += threads) mine.template write<1>(i);
}

// A block does AK_WARP columns of rows_at_once rows, a warp each AK_WARPS-th of them.
template <class G, class X>
AK_FN void norm_columns_block(const ak_norm_args& a) {
  __shared__ float sums[AK_WARPS][2][AK_WARP];
  ak_int64 across = (a.columns + AK_WARP - 1) / AK_WARP, block = blockIdx.x / across;
  int warp = threadIdx.x / AK_WARP, lane = threadIdx.x % AK_WARP;
  ak_int64 column = blockIdx.x % across * AK_WARP + lane, from = block * a.rows_at_once, to = from + a.rows_at_once;
  if (to > a.rows) to = a.rows;
  float of_weight = 0.0f, of_bias = 0.0f, dy[1], x[1];
  if (column < a.columns) {
    for (ak_int64 r = from + warp; r < to; r += AK_WARPS) {
      ak_int64 at = r * a.columns + column;
      G::load((const typename G::type*)a.grad + at, dy), X::load((const typename X::type*)a.in + at, x);
      of_weight += dy[0] * normalised<float>(norm_row(a, r), x[0]), of_bias += dy[0];
    }
  }
  sums[warp][0][lane] = of_weight, sums[warp][1][lane] = of_bias;
  __syncthreads();
  if (warp || column >= a.columns) return;
  for (int other = 1; other < AK_WARPS; other++) of_weight += sums[other][0][lane], of_bias += sums[other][1][lane];
  float* to_sums = a.partial + 2 * block * a.columns + column;
  to_sums[0] = of_weight, to_sums[a.columns] = of_bias;
}

// A thread for each sum.
AK_GLOBAL ak_norm_sums(AK_LAUNCHED(ak_norm_args)) {
  ak_int64 i = (ak_int64)blockIdx.x * blockDim.x + threadIdx.x, columns = launch.columns;
  float* to = i < columns ? launch.grad_weight : launch.grad_bias;
  if (i >= 2 * columns || !to) return;
  double all = 0.0;
  for (ak_int64 block = 0; block * launch.rows_at_once < launch.rows; block++)
    all += (double)launch.partial[2 * block * columns + i];
  to[i < columns ? i : i - columns] = (float)all;
}

// -- statistics of channels --

// Welford's, of one thread.
struct Running {
  float count, mean, squares;

  AK_FN void add(float x) {
    count += 1.0f;
    float apart = x - mean;
    mean += apart / count;
    squares += apart * (x - mean);
  }
};

AK_FN Moments from_threads(const Running& r) { return Moments{(double)r.count, (double)r.mean, (double)r.squares}; }

AK_FN void write_moments(double* to, const Moments& m) { to[0] = m.count, to[1] = m.mean, to[2] = m.squares; }

// A block does one channel of one piece.
template <class X>
AK_FN void statistics_block(const ak_statistics_args& a) {
  __shared__ Moments of_warp[AK_WARPS];
  ak_int64 channel = blockIdx.x % a.channels, piece = blockIdx.x / a.channels;
  ak_int64 from = a.outer * piece / a.pieces, to = a.outer * (piece + 1) / a.pieces, all = (to - from) * a.inner;
  Running mine = {0.0f, 0.0f, 0.0f};
  ak_int64 n = from + threadIdx.x / a.inner, s = threadIdx.x % a.inner;
  ak_int64 rows = blockDim.x / a.inner, rest = blockDim.x % a.inner;
  float x[1];
  for (ak_int64 i = threadIdx.x; i < all; i += blockDim.x) {
    X::load((const typename X::type*)a.in + (n * a.channels + channel) * a.inner + s, x);
    mine.add(x[0]);
    n += rows, s += rest;
    if (s >= a.inner) s -= a.inner, n++;
  }
  Moments moments = from_threads(mine);
  for (int offset = AK_WARP / 2; offset; offset /= 2) {
    Moments other = {
      __shfl_down_sync(0xffffffffu, moments.count, offset), __shfl_down_sync(0xffffffffu, moments.mean, offset),
      __shfl_down_sync(0xffffffffu, moments.squares, offset)};
    // A lane behind the last adds itself; nobody reads it.
    put_together(moments, other);
  }
  if (threadIdx.x % AK_WARP == 0) of_warp[threadIdx.x / AK_WARP] = moments;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < AK_WARPS; warp++) put_together(moments, of_warp[warp]);
  write_moments(a.partial + 3 * (piece * a.channels + channel), moments);
}

// A block does AK_WARP channels whose elements lie side by side (inner is 1), of one piece.
template <class X>
AK_FN void statistics_side_block(const ak_statistics_args& a) {
  __shared__ Running of_warp[AK_WARPS][AK_WARP];
  ak_int64 across = (a.channels + AK_WARP - 1) / AK_WARP, piece = blockIdx.x / across;
  int warp = threadIdx.x / AK_WARP, lane = threadIdx.x % AK_WARP;
  ak_int64 channel = blockIdx.x % across * AK_WARP + lane, to = a.outer * (piece + 1) / a.pieces;
  Running mine = {0.0f, 0.0f, 0.0f};
  float x[1];
  if (channel < a.channels) {
    for (ak_int64 n = a.outer * piece / a.pieces + warp; n < to; n += AK_WARPS) {
      X::load((const typename X::type*)a.in + n * a.channels + channel, x);
      mine.add(x[0]);
    }
  }
  of_warp[warp][lane] = mine;
  __syncthreads();
  if (warp || channel >= a.channels) return;
  Moments moments = from_threads(mine);
  for (int other = 1; other < AK_WARPS; other++) put_together(moments, from_threads(of_warp[other][lane]));
  write_moments(a.partial + 3 * (piece * a.channels + channel), moments);
}

// A thread for each channel.
AK_GLOBAL ak_statistics_sums(AK_LAUNCHED(ak_statistics_args)) {
  ak_int64 channel = (ak_int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= launch.channels) return;
  Moments all = merged(launch, channel);
  launch.means[channel] = mean_of(all), launch.variances[channel] = variance_of(all);
}

AK_GLOBAL ak_merge_parts(AK_LAUNCHED(ak_merge_args)) {
  ak_int64 channel = (ak_int64)blockIdx.x * blockDim.x + threadIdx.x;
  if (channel == 0) {
    double count = 0.0;
    for (ak_int64 part = 0; part < launch.parts; part++) count += (double)launch.counts[part];
    *launch.count = (float)count;
  }
  if (channel >= launch.channels) return;
  Moments all = merged(launch, channel);
  launch.mean[channel] = mean_of(all), launch.variance[channel] = variance_of(all);
}

// Packs a call's tensors into launches, and starts them. Nothing here allocates memory on a device or waits for one.
#include "cuda_launch.h"

#include <cstdio>

#include "cuda_driver.h"
#include "cuda_table.h"

namespace {

const ak_uint32 MOST_BLOCKS = 0x7fffffff;

ak_int64 quotient_up(ak_int64 a, ak_int64 b) { return (a + b - 1) / b; }

ak_int64 parts_of(ak_int64 count) { return quotient_up(count, AK_CUDA_PART); }

CudaModule* module_of(const ak_head& head) { return static_cast<CudaModule*>(head.module); }

// Fills the next launch with tensors from `from` on, as many as go into it; returns the first that does not.
template <class Launch>
ak_int64 pack(Launch& launch, const ak_head& head, ak_int64 from, const void* const* const (&columns)[Launch::WIDTH]) {
  ak_int64 tensor = from;
  ak_uint32 blocks = 0;
  ak_int32 row = 0;
  for (; tensor < head.tensors && row < Launch::ROWS; tensor++, row++) {
    ak_int64 parts = parts_of(head.counts[tensor]);
    if (parts > MOST_BLOCKS - blocks) break;
    launch.first_block[row] = blocks;
    launch.counts[row] = head.counts[tensor];
    for (int column = 0; column < Launch::WIDTH; column++)
      launch.pointers[column][row] = columns[column] ? const_cast<void*>(columns[column][tensor]) : nullptr;
    blocks += (ak_uint32)parts;
  }
  launch.first_tensor = from;
  launch.rows = row;
  launch.first_block[row] = blocks;
  return tensor;
}

// Calls start(launch, blocks) for each launch of a call.
template <class Launch, class Args, class Start>
int each_launch(const Args& args, const void* const* const (&columns)[Launch::WIDTH], Start start) {
  Launch launch;
  launch.args = args;
  launch.first_part = 0;
  for (ak_int64 tensor = 0; tensor < args.head.tensors;) {
    ak_int64 next = pack(launch, args.head, tensor, columns);
    if (next == tensor) return AK_WRONG_VALUE;  // a tensor of more elements than memory holds
    ak_uint32 blocks = launch.first_block[launch.rows];
    int wrong = start(launch, blocks);
    if (wrong) return wrong;
    launch.first_part += blocks;
    tensor = next;
  }
  return AK_OK;
}

template <class T>
const void* const* as_column(T const* const* pointers) {
  return reinterpret_cast<const void* const*>(pointers);
}

// A kernel's name: that of the functor, and a letter for each dtype.
struct Name {
  char text[48];
  Name(const char* kernel, ak_int32 a) { std::snprintf(text, sizeof text, "ak_%s_%c", kernel, of(a)); }
  Name(const char* kernel, ak_int32 a, ak_int32 b) { std::snprintf(text, sizeof text, "ak_%s_%c%c", kernel, of(a), of(b)); }
  Name(const char* kernel, ak_int32 a, ak_int32 b, ak_int32 c) {
    std::snprintf(text, sizeof text, "ak_%s_%c%c%c", kernel, of(a), of(b), of(c));
  }
  static char of(ak_int32 dtype) { return dtype == AK_F32 ? 'f' : dtype == AK_F16 ? 'h' : dtype == AK_BF16 ? 'b' : 'n'; }
};

template <class Launch, class Args>
int run_step(const char* kernel, const Args& args, const void* const* const (&columns)[Launch::WIDTH]) {
  Name name(kernel, args.grad_dtype, args.param_dtype, args.half_dtype);
  return each_launch<Launch>(args, columns, [&](Launch& launch, ak_uint32 blocks) {
    if (!blocks) return (int)AK_OK;
    return cuda_start(module_of(args.head), name.text, blocks, args.head.stream, &launch);
  });
}

int advance(const ak_head& head, const ak_step& step) {
  if (!step.advance || (!step.one && !step.each)) return AK_OK;
  ak_advance_launch launch;
  launch.args = {step, head.found_inf};
  ak_int64 tensor = 0;
  do {
    ak_int32 row = 0;
    for (; step.each && row < ak_advance_launch::ROWS && tensor < head.tensors; row++, tensor++)
      launch.pointers[0][row] = step.each[tensor];
    launch.rows = row;
    ak_uint32 blocks = (ak_uint32)(row + AK_CUDA_THREADS - 1) / AK_CUDA_THREADS;
    int wrong = cuda_start(module_of(head), "ak_advance", blocks ? blocks : 1, head.stream, &launch);
    if (wrong) return wrong;
    launch.args.step.one = nullptr;
  } while (step.each && tensor < head.tensors);
  return AK_OK;
}

// Starts a kernel whose parameter is the struct of arguments itself; of no blocks nothing.
template <class Args>
int start(const char* name, ak_int64 blocks, const Args& args) {
  if (blocks > (ak_int64)MOST_BLOCKS) return AK_WRONG_VALUE;
  return blocks ? cuda_start(module_of(args.head), name, (ak_uint32)blocks, args.head.stream, &args) : (int)AK_OK;
}

// The columns of a step but for its states.
template <class Args>
void fill_columns(const Args& a, const void* const** columns) {
  columns[AK_GRADS] = a.grads, columns[AK_PARAMS] = as_column(a.params), columns[AK_HALVES] = as_column(a.halves);
}

}  // namespace

int cuda_adam(const ak_adam_args& a) {
  CudaContext context(module_of(a.head));
  int wrong = context.wrong() ? context.wrong() : advance(a.head, a.step);
  if (wrong) return wrong;
  const void* const* columns[ak_adam_launch::WIDTH] = {};
  fill_columns(a, columns);
  columns[AK_STATE1] = as_column(a.exp_avgs), columns[AK_STATE2] = as_column(a.exp_avg_sqs);
  columns[AK_STATE3] = as_column(a.max_exp_avg_sqs), columns[AK_ADAM_STEPS] = as_column(a.step.each);
  return run_step<ak_adam_launch>("adam", a, columns);
}

int cuda_sgd(const ak_sgd_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  const void* const* columns[ak_sgd_launch::WIDTH] = {};
  fill_columns(a, columns);
  columns[AK_STATE1] = as_column(a.buffers);
  return run_step<ak_sgd_launch>("sgd", a, columns);
}

int cuda_adagrad(const ak_adagrad_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  const void* const* columns[ak_adagrad_launch::WIDTH] = {};
  fill_columns(a, columns);
  columns[AK_STATE1] = as_column(a.sums);
  return run_step<ak_adagrad_launch>("adagrad", a, columns);
}

int cuda_scale(const ak_scale_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  CudaModule* module = module_of(a.head);
  const void* const* columns[ak_scale_launch::WIDTH] = {a.ins, as_column(a.outs)};
  Name name("scale", a.in_dtype, a.out_dtype);
  int wrong = each_launch<ak_scale_launch>(a, columns, [&](ak_scale_launch& launch, ak_uint32 blocks) {
    int failed = blocks ? cuda_start(module, name.text, blocks, a.head.stream, &launch) : (int)AK_OK;
    if (failed || !a.partial) return failed;
    return cuda_start(module, "ak_scale_norms", (ak_uint32)launch.rows, a.head.stream, &launch);
  });
  if (wrong || !a.total) return wrong;
  return cuda_start(module, "ak_scale_total", 1, a.head.stream, &a);
}

int cuda_axpby(const ak_axpby_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  const void* const* columns[ak_axpby_launch::WIDTH] = {a.xs, a.ys, as_column(a.outs)};
  Name name("axpby", a.x_dtype, a.y_dtype, a.out_dtype);
  return each_launch<ak_axpby_launch>(a, columns, [&](ak_axpby_launch& launch, ak_uint32 blocks) {
    return blocks ? cuda_start(module_of(a.head), name.text, blocks, a.head.stream, &launch) : (int)AK_OK;
  });
}

int cuda_lamb(const ak_lamb_args& a) {
  CudaModule* module = module_of(a.head);
  CudaContext context(module);
  int wrong = context.wrong() ? context.wrong() : advance(a.head, a.step);
  if (wrong) return wrong;
  const void* const* columns[ak_lamb_launch::WIDTH] = {};
  fill_columns(a, columns);
  columns[AK_STATE1] = as_column(a.exp_avgs), columns[AK_STATE2] = as_column(a.exp_avg_sqs);
  columns[AK_LAMB_STEPS] = as_column(a.step.each);
  Name first("lamb", a.grad_dtype, a.param_dtype, a.half_dtype), last("lamb_last", a.param_dtype, a.half_dtype);
  return each_launch<ak_lamb_launch>(a, columns, [&](ak_lamb_launch& launch, ak_uint32 blocks) {
    if (!blocks) return (int)AK_OK;
    int failed = cuda_start(module, first.text, blocks, a.head.stream, &launch);
    if (failed || !(a.flags & AK_TRUST)) return failed;
    failed = cuda_start(module, "ak_lamb_ratios", (ak_uint32)launch.rows, a.head.stream, &launch);
    return failed ? failed : cuda_start(module, last.text, blocks, a.head.stream, &launch);
  });
}

int cuda_novograd(const ak_novograd_args& a) {
  CudaModule* module = module_of(a.head);
  CudaContext context(module);
  int wrong = context.wrong() ? context.wrong() : advance(a.head, a.step);
  if (wrong) return wrong;
  ak_scale_args measure = {};
  measure.head = a.head, measure.grad_scale = a.grad_scale, measure.partial = a.partial, measure.flags = a.flags;
  const void* const* grads[ak_scale_launch::WIDTH] = {a.grads, nullptr};
  Name norms("scale", a.grad_dtype, AK_NO_DTYPE), step("novograd", a.grad_dtype, a.param_dtype, a.half_dtype);
  wrong = each_launch<ak_scale_launch>(measure, grads, [&](ak_scale_launch& launch, ak_uint32 blocks) {
    return blocks ? cuda_start(module, norms.text, blocks, a.head.stream, &launch) : (int)AK_OK;
  });
  if (wrong) return wrong;
  const void* const* columns[ak_novograd_launch::WIDTH] = {};
  fill_columns(a, columns);
  columns[AK_STATE1] = as_column(a.exp_avgs), columns[AK_STATE2] = as_column(a.norms);
  columns[AK_NOVOGRAD_STEPS] = as_column(a.step.each);
  return each_launch<ak_novograd_launch>(a, columns, [&](ak_novograd_launch& launch, ak_uint32 blocks) {
    int failed = cuda_start(module, "ak_novograd_norms", (ak_uint32)launch.rows, a.head.stream, &launch);
    return failed || !blocks ? failed : cuda_start(module, step.text, blocks, a.head.stream, &launch);
  });
}

int cuda_norm(const ak_norm_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  Name rows("norm", a.grad_dtype, a.in_dtype), columns("norm_columns", a.grad_dtype, a.in_dtype);
  ak_int64 at_once = a.columns <= AK_NORM_COLUMNS ? AK_WARPS : 1;
  int wrong = a.grad_in && a.columns ? start(rows.text, quotient_up(a.rows, at_once), a) : (int)AK_OK;
  if (wrong || !a.partial) return wrong;
  ak_int64 blocks = quotient_up(a.rows, a.rows_at_once) * quotient_up(a.columns, AK_WARP);
  wrong = start(columns.text, blocks, a);
  return wrong ? wrong : start("ak_norm_sums", quotient_up(2 * a.columns, AK_CUDA_THREADS), a);
}

int cuda_statistics(const ak_statistics_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  bool side_by_side = a.inner == 1;
  Name name(side_by_side ? "statistics_side" : "statistics", a.in_dtype);
  int wrong = start(name.text, a.pieces * (side_by_side ? quotient_up(a.channels, AK_WARP) : a.channels), a);
  return wrong ? wrong : start("ak_statistics_sums", quotient_up(a.channels, AK_CUDA_THREADS), a);
}

int cuda_merge(const ak_merge_args& a) {
  CudaContext context(module_of(a.head));
  if (context.wrong()) return context.wrong();
  // One at least, for the count.
  return start("ak_merge_parts", a.channels ? quotient_up(a.channels, AK_CUDA_THREADS) : 1, a);
}

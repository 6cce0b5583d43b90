// cuDNN by its older interface: descriptors that remember what they describe, sizes, and counts of calls.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <cudnn.h>
void null_count(int, const char *, size_t);
static int null_made(void **p) {
    *p = calloc(1, 256);
    return 0;
}
// -- cuDNN: descriptors that remember what they describe, and sizes --
struct desc {
    int type, dims, dim[8];
};
struct rnn {
    int mode, bias, dirs, type, input, hidden, proj, layers;
};
static struct rnn last_rnn;
cudnnStatus_t cudnnCreate(cudnnHandle_t *h) { return null_made((void **)h); }
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t d, cudnnDataType_t t, int n, const int *dim,
                                         const int *stride) {
    struct desc *p = (void *)d;
    p->type = t;
    p->dims = n;
    for (int i = 0; i < n && i < 8; i++) p->dim[i] = dim[i];
    return 0;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t d, int want, cudnnDataType_t *t, int *n,
                                         int *dim, int *stride) {
    struct desc *p = (void *)d;
    *t = p->type;
    *n = p->dims;
    int s = 1;
    for (int i = p->dims - 1; i >= 0; i--) {
        if (i < want) {
            dim[i] = p->dim[i];
            if (stride) stride[i] = s;
        }
        s *= p->dim[i];
    }
    return 0;
}
cudnnStatus_t cudnnSetFilterNdDescriptor(cudnnFilterDescriptor_t d, cudnnDataType_t t, cudnnTensorFormat_t f, int n,
                                         const int *dim) {
    struct desc *p = (void *)d;
    p->type = t;
    p->dims = n;
    for (int i = 0; i < n && i < 8; i++) p->dim[i] = dim[i];
    return 0;
}
cudnnStatus_t cudnnGetFilterNdDescriptor(const cudnnFilterDescriptor_t d, int want, cudnnDataType_t *t,
                                         cudnnTensorFormat_t *f, int *n, int *dim) {
    struct desc *p = (void *)d;
    *t = p->type;
    *f = 0;
    *n = p->dims;
    for (int i = 0; i < p->dims && i < want; i++) dim[i] = p->dim[i];
    return 0;
}
cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t d, cudnnRNNAlgo_t algo, cudnnRNNMode_t mode,
                                       cudnnRNNBiasMode_t bias, cudnnDirectionMode_t dir, cudnnRNNInputMode_t im,
                                       cudnnDataType_t t, cudnnDataType_t prec, cudnnMathType_t math, int32_t in,
                                       int32_t hid, int32_t proj, int32_t layers, cudnnDropoutDescriptor_t drop,
                                       uint32_t flags) {
    struct rnn *r = (void *)d;
    *r = (struct rnn){mode, bias, dir == CUDNN_BIDIRECTIONAL ? 2 : 1, t, in, hid, proj, layers};
    last_rnn = *r;
    return 0;
}
static int gates(const struct rnn *r) { return r->mode == CUDNN_LSTM ? 4 : r->mode == CUDNN_GRU ? 3 : 1; }
static size_t width(int type) {
    return type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? 2 : type == CUDNN_DATA_DOUBLE ? 8 : 4;
}
static size_t place(const struct rnn *r, int pseudo, int lin, int *rows, int *cols, size_t *bias) {
    // Matrices of all layers, then biases of all layers.
    int g = gates(r), out = r->proj && r->proj != r->hidden ? r->proj : r->hidden, projects = out != r->hidden;
    size_t at = 0, b = 0;
    for (int l = 0; l < r->layers * r->dirs; l++) {
        int in = l < r->dirs ? r->input : out * r->dirs;
        for (int i = 0; i < 2 * g + projects; i++) {
            int rr = i < 2 * g ? r->hidden : out, cc = i < g ? in : i < 2 * g ? out : r->hidden;
            if (l == pseudo && i == lin) {
                if (rows) {
                    *rows = rr;
                    *cols = cc;
                }
                if (bias) *bias = b;
                return at;
            }
            at += (size_t)rr * cc;
            if (i < 2 * g) b += rr;
        }
    }
    if (bias) *bias = b;
    return at;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t h, cudnnRNNDescriptor_t d, size_t *n) {
    struct rnn *r = (void *)d;
    size_t b;
    *n = place(r, -1, 0, 0, 0, &b);
    if (r->bias) *n += b;
    *n *= width(r->type);
    return 0;
}
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t h, cudnnRNNDescriptor_t d, int32_t pseudo, size_t n,
                                      const void *space, int32_t lin, cudnnTensorDescriptor_t m, void **ma,
                                      cudnnTensorDescriptor_t b, void **ba) {
    struct rnn *r = (void *)d;
    int rows = 0, cols = 0;
    size_t bias = 0, all, at, w = width(r->type), total = place(r, -1, 0, 0, 0, &all);
    if (lin >= 2 * gates(r) && !(r->proj && r->proj != r->hidden)) {
        if (ma) *ma = NULL;
        if (ba) *ba = NULL;
        return 0;
    }
    at = place(r, pseudo, lin, &rows, &cols, &bias);
    struct desc *p = (void *)m;
    if (p) {
        p->type = r->type;
        p->dims = 3;
        p->dim[0] = 1;
        p->dim[1] = rows;
        p->dim[2] = cols;
    }
    if (ma) *ma = (char *)space + at * w;
    p = (void *)b;
    if (p) {
        p->type = r->type;
        p->dims = 3;
        p->dim[0] = 1;
        p->dim[1] = rows;
        p->dim[2] = 1;
    }
    if (ba) *ba = r->bias && lin < 2 * gates(r) ? (char *)space + (total + bias) * w : NULL;
    return 0;
}
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t d, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t x, size_t *w, size_t *r) {
    if (w) *w = 1024;
    if (r) *r = 1024;
    return 0;
}
static int rnn_call(const char *name) {
    char s[96];
    snprintf(s, sizeof s, "%s:%d", name, last_rnn.type);
    null_count(1, s, 0);
    return 0;
}
int x_cudnnRNNForward() __asm__("cudnnRNNForward");
int x_cudnnRNNForward() { return rnn_call("cudnnRNNForward"); }
int x_cudnnRNNBackwardData_v8() __asm__("cudnnRNNBackwardData_v8");
int x_cudnnRNNBackwardData_v8() { return rnn_call("cudnnRNNBackwardData_v8"); }
int x_cudnnRNNBackwardWeights_v8() __asm__("cudnnRNNBackwardWeights_v8");
int x_cudnnRNNBackwardWeights_v8() { return rnn_call("cudnnRNNBackwardWeights_v8"); }
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *n) {
    *n = 1024;
    return 0;
}
#define ALGO(NAME, T, A, B, C, D)                                                                                      \
    cudnnStatus_t NAME(cudnnHandle_t h, A a, B b, C c, D d, const int want, int *n, T *perf) {                         \
        memset(perf, 0, sizeof *perf);                                                                                 \
        *n = 1;                                                                                                        \
        return 0;                                                                                                      \
    }
ALGO(cudnnGetConvolutionForwardAlgorithm_v7, cudnnConvolutionFwdAlgoPerf_t, const cudnnTensorDescriptor_t,
     const cudnnFilterDescriptor_t, const cudnnConvolutionDescriptor_t, const cudnnTensorDescriptor_t)
ALGO(cudnnGetConvolutionBackwardDataAlgorithm_v7, cudnnConvolutionBwdDataAlgoPerf_t, const cudnnFilterDescriptor_t,
     const cudnnTensorDescriptor_t, const cudnnConvolutionDescriptor_t, const cudnnTensorDescriptor_t)
ALGO(cudnnGetConvolutionBackwardFilterAlgorithm_v7, cudnnConvolutionBwdFilterAlgoPerf_t, const cudnnTensorDescriptor_t,
     const cudnnTensorDescriptor_t, const cudnnConvolutionDescriptor_t, const cudnnFilterDescriptor_t)
cudnnStatus_t cudnnGetConvolutionForwardWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t a,
                                                      const cudnnFilterDescriptor_t b,
                                                      const cudnnConvolutionDescriptor_t c,
                                                      const cudnnTensorDescriptor_t d, cudnnConvolutionFwdAlgo_t e,
                                                      size_t *n) {
    *n = 0;
    return 0;
}
cudnnStatus_t cudnnGetConvolutionBackwardDataWorkspaceSize(cudnnHandle_t h, const cudnnFilterDescriptor_t a,
                                                           const cudnnTensorDescriptor_t b,
                                                           const cudnnConvolutionDescriptor_t c,
                                                           const cudnnTensorDescriptor_t d,
                                                           cudnnConvolutionBwdDataAlgo_t e, size_t *n) {
    *n = 0;
    return 0;
}
cudnnStatus_t cudnnGetConvolutionBackwardFilterWorkspaceSize(cudnnHandle_t h, const cudnnTensorDescriptor_t a,
                                                             const cudnnTensorDescriptor_t b,
                                                             const cudnnConvolutionDescriptor_t c,
                                                             const cudnnFilterDescriptor_t d,
                                                             cudnnConvolutionBwdFilterAlgo_t e, size_t *n) {
    *n = 0;
    return 0;
}
static int of(const char *name, const void *d) {
    char s[96];
    snprintf(s, sizeof s, "%s:%d", name, ((struct desc *)d)->type);
    null_count(1, s, 0);
    return 0;
}
int x_cudnnConvolutionForward(void *h, const void *alpha, void *x) __asm__("cudnnConvolutionForward");
int x_cudnnConvolutionForward(void *h, const void *alpha, void *x) { return of("cudnnConvolutionForward", x); }
int x_cudnnConvolutionBackwardData(void *h, const void *alpha, void *w) __asm__("cudnnConvolutionBackwardData");
int x_cudnnConvolutionBackwardData(void *h, const void *alpha, void *w) {
    return of("cudnnConvolutionBackwardData", w);
}
int x_cudnnConvolutionBackwardFilter(void *h, const void *alpha, void *x) __asm__("cudnnConvolutionBackwardFilter");
int x_cudnnConvolutionBackwardFilter(void *h, const void *alpha, void *x) {
    return of("cudnnConvolutionBackwardFilter", x);
}
int x_cudnnBatchNormalizationForwardTrainingEx(void *h, int mode, int ops, const void *alpha, const void *beta,
                                               void *x) __asm__("cudnnBatchNormalizationForwardTrainingEx");
int x_cudnnBatchNormalizationForwardTrainingEx(void *h, int mode, int ops, const void *alpha, const void *beta,
                                               void *x) {
    return of("cudnnBatchNormalizationForwardTrainingEx", x);
}
int x_cudnnBatchNormalizationBackwardEx(void *h, int mode, int ops, const void *a, const void *b, const void *c,
                                        const void *d, void *x) __asm__("cudnnBatchNormalizationBackwardEx");
int x_cudnnBatchNormalizationBackwardEx(void *h, int mode, int ops, const void *a, const void *b, const void *c,
                                        const void *d, void *x) {
    return of("cudnnBatchNormalizationBackwardEx", x);
}
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t a,
    const cudnnTensorDescriptor_t b, const cudnnTensorDescriptor_t c, const cudnnTensorDescriptor_t d,
    const cudnnActivationDescriptor_t e, size_t *n) {
    *n = 0;
    return 0;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t a,
    const cudnnTensorDescriptor_t b, const cudnnTensorDescriptor_t c, const cudnnTensorDescriptor_t d,
    const cudnnTensorDescriptor_t e, const cudnnTensorDescriptor_t f, const cudnnActivationDescriptor_t g, size_t *n) {
    *n = 0;
    return 0;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m,
                                                                   cudnnBatchNormOps_t o,
                                                                   const cudnnActivationDescriptor_t e,
                                                                   const cudnnTensorDescriptor_t a, size_t *n) {
    *n = 64;
    return 0;
}

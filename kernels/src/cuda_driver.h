// The CUDA driver, found at run time: a build needs no toolkit for it, and loads where there is no GPU.
#ifndef AUTOAMP_KERNELS_CUDA_DRIVER_H
#define AUTOAMP_KERNELS_CUDA_DRIVER_H

#include "abi.h"

// An image that was loaded for one device, with its kernels. What `ak_head.module` points to.
struct CudaModule;

// Starts `blocks` blocks of a kernel of the module, by its name, whose one parameter is the struct `launch`.
int cuda_start(CudaModule* module, const char* name, ak_uint32 blocks, void* stream, const void* launch);

// The calling thread's context is the module's as long as this lives.
class CudaContext {
 public:
  explicit CudaContext(CudaModule* module);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;
  int wrong() const { return wrong_; }

 private:
  int wrong_;
  bool pushed_;
};

#endif

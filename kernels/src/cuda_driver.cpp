#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cuda_table.h"

#define AK_PUBLIC extern "C" __attribute__((visibility("default")))

// From CUDA's documentation of the driver API: handles are pointers, results are ints, a device is its number.
typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext, *CUmod, *CUfunction, *CUstream;

namespace {

enum { COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...

struct Driver {
  CUresult (*init)(unsigned);
  CUresult (*version)(int*);
  CUresult (*devices)(int*);
  CUresult (*device)(CUdevice*, int);
  CUresult (*attribute)(int*, int, CUdevice);
  CUresult (*retain)(CUcontext*, CUdevice);
  CUresult (*current)(CUcontext*);
  CUresult (*push)(CUcontext);
  CUresult (*pop)(CUcontext*);
  CUresult (*load)(CUmod*, const void*);
  CUresult (*unload)(CUmod);
  CUresult (*function)(CUfunction*, CUmod, const char*);
  CUresult (*launch)(
      CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**, void**);
  CUresult (*error_name)(CUresult, const char**);
  CUresult (*error_text)(CUresult, const char**);
};

// Where a function's name carries a version, that is the one whose signature stands above.
const char* const NAMES[] = {
  "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute",
  "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuModuleLoadData",
  "cuModuleUnload", "cuModuleGetFunction", "cuLaunchKernel", "cuGetErrorName", "cuGetErrorString"};
static_assert(sizeof(Driver) == sizeof NAMES, "a name for each function");

Driver driver;
bool loaded = false;
thread_local char message[512] = "";

int failed(CUresult result, const char* what, const char* name = "") {
  if (!result) return AK_OK;
  const char *code = nullptr, *text = nullptr;
  driver.error_name(result, &code), driver.error_text(result, &text);
  std::snprintf(
      message, sizeof message, "%s%s%s failed: %s (%d): %s", what, *name ? " of " : "", name, code ? code : "error",
      result, text ? text : "unknown to this driver");
  return AK_CUDA_ERROR + result;
}

}  // namespace

struct CudaModule {
  CUcontext context;
  CUmod image;
  std::mutex lock;
  std::unordered_map<std::string, CUfunction> functions;
};

CudaContext::CudaContext(CudaModule* module) : wrong_(AK_OK), pushed_(false) {
  CUcontext now = nullptr;
  wrong_ = failed(driver.current(&now), "cuCtxGetCurrent");
  if (wrong_ || now == module->context) return;
  wrong_ = failed(driver.push(module->context), "cuCtxPushCurrent");
  pushed_ = !wrong_;
}

CudaContext::~CudaContext() {
  CUcontext ours;
  if (pushed_) driver.pop(&ours);
}

int cuda_start(CudaModule* module, const char* name, ak_uint32 blocks, void* stream, const void* launch) {
  CUfunction function = nullptr;
  {
    std::lock_guard<std::mutex> lock(module->lock);
    CUfunction& known = module->functions[name];
    if (!known) {
      int wrong = failed(driver.function(&known, module->image, name), "cuModuleGetFunction", name);
      if (wrong) return wrong;
    }
    function = known;
  }
  void* parameters[] = {const_cast<void*>(launch)};
  return failed(
      driver.launch(function, blocks, 1, 1, AK_CUDA_THREADS, 1, 1, 0, stream, parameters, nullptr), "cuLaunchKernel",
      name);
}

// What went wrong last in this thread with the driver.
AK_PUBLIC const char* ak_cuda_message(void) { return message; }

// Loads the driver from a file, "libcuda.so.1" as a rule, instead of any that was loaded before.
AK_PUBLIC int ak_cuda_driver(const char* path) {
  loaded = false;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::snprintf(message, sizeof message, "%s", dlerror());
    return AK_NO_DEVICE;
  }
  void* found[sizeof NAMES / sizeof *NAMES];
  for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
    found[i] = dlsym(library, NAMES[i]);
    if (!found[i]) {
      std::snprintf(message, sizeof message, "%s has no function %s", path, NAMES[i]);
      return AK_NO_DEVICE;
    }
  }
  __builtin_memcpy(&driver, found, sizeof driver);
  loaded = true;
  return AK_OK;
}

// The version of CUDA that the driver speaks, such as 12010 for 12.1.
AK_PUBLIC int ak_cuda_version(int* version) {
  return loaded ? failed(driver.version(version), "cuDriverGetVersion") : AK_NO_DEVICE;
}

AK_PUBLIC int ak_cuda_devices(int* devices) {
  if (!loaded) return AK_NO_DEVICE;
  int wrong = failed(driver.init(0), "cuInit");
  return wrong ? wrong : failed(driver.devices(devices), "cuDeviceGetCount");
}

// A device's compute capability, such as 90 for 9.0.
AK_PUBLIC int ak_cuda_capability(int device, int* capability) {
  if (!loaded) return AK_NO_DEVICE;
  CUdevice handle;
  int major = 0, minor = 0, wrong = failed(driver.init(0), "cuInit");
  if (!wrong) wrong = failed(driver.device(&handle, device), "cuDeviceGet");
  if (!wrong) wrong = failed(driver.attribute(&major, COMPUTE_MAJOR, handle), "cuDeviceGetAttribute");
  if (!wrong) wrong = failed(driver.attribute(&minor, COMPUTE_MINOR, handle), "cuDeviceGetAttribute");
  *capability = 10 * major + minor;
  return wrong;
}

// Loads an image (cubin, fat binary or PTX) into the primary context of a device, which is torch's too.
AK_PUBLIC int ak_cuda_open(int device, const void* image, CudaModule** module) {
  if (!loaded) return AK_NO_DEVICE;
  CudaModule* made = new CudaModule();
  CUdevice handle;
  int wrong = failed(driver.init(0), "cuInit");
  if (!wrong) wrong = failed(driver.device(&handle, device), "cuDeviceGet");
  if (!wrong) wrong = failed(driver.retain(&made->context, handle), "cuDevicePrimaryCtxRetain");
  if (!wrong) {
    CudaContext context(made);
    wrong = context.wrong();
    if (!wrong) wrong = failed(driver.load(&made->image, image), "cuModuleLoadData");
  }
  if (wrong) delete made;
  else *module = made;
  return wrong;
}

// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>

namespace kvrail {

const CudaDriver& CudaDriver::get() {
  // When the constructor throws, the next call tries again.
  static const CudaDriver driver;
  return driver;
}

CudaDriver::CudaDriver() {
  // Never unloaded: the driver has threads and exit handlers of its own.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw CudaError("dlopen", "NO_DRIVER",
                    std::string("the NVIDIA driver cannot be loaded: ") + (why != nullptr ? why : "libcuda.so.1") +
                        "; install it, or give the container access to the GPU");
  }
#define KVRAIL_FIND(name, symbol, ...)                              \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #symbol)); \
  if (name == nullptr) throw CudaError("dlsym", "NO_DRIVER", "the NVIDIA driver is too old: it has no " #symbol);
  KVRAIL_CUDA_CALLS(KVRAIL_FIND)
#undef KVRAIL_FIND
  check(init(0), "cuInit");
}

void CudaDriver::fail(int result, const char* call, const std::string& advice) const {
  const char* status = nullptr;
  const char* text = nullptr;
  if (error_name(result, &status) != kCudaSuccess || status == nullptr) status = "CUDA_ERROR_UNKNOWN";
  if (error_string(result, &text) != kCudaSuccess || text == nullptr) text = "unknown error";
  throw CudaError(call, status, advice.empty() ? text : std::string(text) + ": " + advice);
}

}  // namespace kvrail

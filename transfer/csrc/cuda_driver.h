// SPDX-License-Identifier: Apache-2.0
// The few calls of the CUDA driver that are used here, found in libcuda.so.1 at run time: the same build works
// with and without a GPU, and needs no CUDA headers.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvrail {

using CuAddress = std::uint64_t;  // CUdeviceptr
using CuContext = struct CUctx_st*;
using CuStream = struct CUstream_st*;
using CuEvent = struct CUevent_st*;
using CuModule = struct CUmod_st*;
using CuFunction = struct CUfunc_st*;
struct CuUuid {
  char bytes[16];
};
struct CuIpcHandle {
  char bytes[64];
};

inline constexpr int kCudaSuccess = 0, kCudaOutOfMemory = 2, kCudaNotReady = 600;
// Of this thread: its calls have nothing to do with captures on other threads.
inline constexpr int kCaptureRelaxed = 2;

// A call that failed. `status` is the driver's name for the reason, or NO_DRIVER.
class CudaError : public std::runtime_error {
 public:
  CudaError(std::string call, std::string status, std::string text)
      : std::runtime_error(call + ": " + text + " (" + status + ")"),
        call(std::move(call)),
        status(std::move(status)),
        text(std::move(text)) {}

  const std::string call;
  const std::string status;
  const std::string text;
};

// clang-format off
#define KVRAIL_CUDA_CALLS(X)                                                                                      \
  X(init, cuInit, unsigned)                                                                                       \
  X(error_name, cuGetErrorName, int, const char**)                                                                \
  X(error_string, cuGetErrorString, int, const char**)                                                            \
  X(device_count, cuDeviceGetCount, int*)                                                                         \
  X(device_get, cuDeviceGet, int*, int)                                                                           \
  X(device_name, cuDeviceGetName, char*, int, int)                                                                \
  X(device_uuid, cuDeviceGetUuid_v2, CuUuid*, int)                                                                \
  X(device_attribute, cuDeviceGetAttribute, int*, int, int)                                                       \
  X(context_retain, cuDevicePrimaryCtxRetain, CuContext*, int)                                                    \
  X(context_release, cuDevicePrimaryCtxRelease_v2, int)                                                           \
  X(context_set, cuCtxSetCurrent, CuContext)                                                                      \
  X(context_push, cuCtxPushCurrent_v2, CuContext)                                                                 \
  X(context_pop, cuCtxPopCurrent_v2, CuContext*)                                                                  \
  X(capture_mode, cuThreadExchangeStreamCaptureMode, int*)                                                        \
  X(priority_range, cuCtxGetStreamPriorityRange, int*, int*)                                                      \
  X(memory_info, cuMemGetInfo_v2, std::size_t*, std::size_t*)                                                     \
  X(allocate, cuMemAlloc_v2, CuAddress*, std::size_t)                                                             \
  X(free, cuMemFree_v2, CuAddress)                                                                                \
  X(address_range, cuMemGetAddressRange_v2, CuAddress*, std::size_t*, CuAddress)                                  \
  X(host_allocate, cuMemHostAlloc, void**, std::size_t, unsigned)                                                 \
  X(host_free, cuMemFreeHost, void*)                                                                              \
  X(host_register, cuMemHostRegister_v2, void*, std::size_t, unsigned)                                            \
  X(host_unregister, cuMemHostUnregister, void*)                                                                  \
  X(host_address, cuMemHostGetDevicePointer_v2, CuAddress*, void*, unsigned)                                      \
  X(set_bytes, cuMemsetD8Async, CuAddress, unsigned char, std::size_t, CuStream)                                  \
  X(copy, cuMemcpyAsync, CuAddress, CuAddress, std::size_t, CuStream)                                             \
  X(stream_create, cuStreamCreateWithPriority, CuStream*, unsigned, int)                                          \
  X(stream_destroy, cuStreamDestroy_v2, CuStream)                                                                 \
  X(stream_wait, cuStreamWaitEvent, CuStream, CuEvent, unsigned)                                                  \
  X(stream_synchronize, cuStreamSynchronize, CuStream)                                                            \
  X(flush_writes, cuFlushGPUDirectRDMAWrites, int, int)                                                           \
  X(event_create, cuEventCreate, CuEvent*, unsigned)                                                              \
  X(event_record, cuEventRecord, CuEvent, CuStream)                                                               \
  X(event_query, cuEventQuery, CuEvent)                                                                           \
  X(event_elapsed, cuEventElapsedTime, float*, CuEvent, CuEvent)                                                  \
  X(event_synchronize, cuEventSynchronize, CuEvent)                                                               \
  X(event_destroy, cuEventDestroy_v2, CuEvent)                                                                    \
  X(module_load, cuModuleLoadData, CuModule*, const void*)                                                        \
  X(module_unload, cuModuleUnload, CuModule)                                                                      \
  X(module_function, cuModuleGetFunction, CuFunction*, CuModule, const char*)                                     \
  X(launch, cuLaunchKernel, CuFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,     \
    CuStream, void**, void**)                                                                                     \
  X(ipc_handle, cuIpcGetMemHandle, CuIpcHandle*, CuAddress)                                                       \
  X(ipc_open, cuIpcOpenMemHandle_v2, CuAddress*, CuIpcHandle, unsigned)                                           \
  X(ipc_close, cuIpcCloseMemHandle, CuAddress)
// clang-format on

class CudaDriver {
 public:
  // Loads and initialises it, once a process. Throws CudaError saying what is missing.
  static const CudaDriver& get();

#define KVRAIL_DECLARE(name, symbol, ...) int (*name)(__VA_ARGS__) = nullptr;
  KVRAIL_CUDA_CALLS(KVRAIL_DECLARE)
#undef KVRAIL_DECLARE

  // Throws for anything but success.
  void check(int result, const char* call) const {
    if (result != kCudaSuccess) fail(result, call, {});
  }
  [[noreturn]] void fail(int result, const char* call, const std::string& advice) const;

 private:
  CudaDriver();
};

}  // namespace kvrail

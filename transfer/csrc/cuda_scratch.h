// SPDX-License-Identifier: Apache-2.0
// Small memory for our own use with a kernel: in the host, pinned, and on the GPU.
#pragma once

#include <cstdint>

#include "cuda_device.h"

namespace kvrail {

class HostScratch {
 public:
  HostScratch(const CudaDevice& device, std::uint64_t nbytes) : device_(device) {
    CudaScope scope(device);
    const CudaDriver& driver = device.driver();
    driver.check(driver.host_allocate(&data_, nbytes, kPortable | kDeviceMap), "cuMemHostAlloc");
    if (int result = driver.host_address(&address_, data_, 0); result != kCudaSuccess) {
      (void)driver.host_free(data_);
      driver.fail(result, "cuMemHostGetDevicePointer", {});
    }
  }
  ~HostScratch() {
    CudaScope scope(device_, std::nothrow);
    if (scope.entered()) (void)device_.driver().host_free(data_);
  }
  HostScratch(const HostScratch&) = delete;
  HostScratch& operator=(const HostScratch&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  // As the GPU sees it.
  CuAddress address() const { return address_; }

 private:
  static constexpr unsigned kPortable = 1, kDeviceMap = 2;
  const CudaDevice& device_;
  void* data_ = nullptr;
  CuAddress address_ = 0;
};

// Zeroed.
class DeviceScratch {
 public:
  DeviceScratch(const CudaDevice& device, std::uint64_t nbytes, const CudaStream& stream) : device_(device) {
    CudaScope scope(device);
    const CudaDriver& driver = device.driver();
    driver.check(driver.allocate(&address_, nbytes), "cuMemAlloc");
    int result = driver.set_bytes(address_, 0, nbytes, stream.handle());
    if (result == kCudaSuccess) result = driver.stream_synchronize(stream.handle());
    if (result == kCudaSuccess) return;
    (void)driver.free(address_);
    driver.fail(result, "cuMemsetD8Async", {});
  }
  ~DeviceScratch() {
    CudaScope scope(device_, std::nothrow);
    if (scope.entered()) (void)device_.driver().free(address_);
  }
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;

  CuAddress address() const { return address_; }

 private:
  const CudaDevice& device_;
  CuAddress address_ = 0;
};

}  // namespace kvrail

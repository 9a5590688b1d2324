// SPDX-License-Identifier: Apache-2.0
#include "cuda_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

namespace kvrail {
namespace {

constexpr std::uint64_t kBlock = 2 << 20;
constexpr unsigned kPortable = 1, kDeviceMap = 2;
// One registration of everything is refused by some drivers, and takes a lock for seconds.
constexpr std::uint64_t kPinChunk = std::uint64_t{1} << 30;

std::string mebibytes(std::uint64_t nbytes) { return std::to_string(nbytes >> 20) + " MiB"; }

std::string memlock_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return mebibytes(limit.rlim_cur);
}

}  // namespace

DeviceMemory::DeviceMemory(std::shared_ptr<CudaDevice> device, std::uint64_t nbytes)
    : device_(std::move(device)), nbytes_(nbytes) {
  const CudaDriver& driver = device_->driver();
  CudaStream stream(*device_);
  CudaScope scope(*device_);
  const std::uint64_t size = (nbytes + kBlock - 1) / kBlock * kBlock;
  if (int result = driver.allocate(&address_, size); result != kCudaSuccess) {
    std::size_t free = 0, total = 0;
    (void)driver.memory_info(&free, &total);
    address_ = 0;
    driver.fail(result, "cuMemAlloc",
                mebibytes(size) + " are needed, and CUDA device " + std::to_string(device_->ordinal()) + " (" +
                    device_->name() + ") has " + mebibytes(free) + " free of " + mebibytes(total));
  }
  try {
    driver.check(driver.set_bytes(address_, 0, size, stream.handle()), "cuMemsetD8Async");
    stream.wait();
  } catch (...) {
    close();
    throw;
  }
}

void DeviceMemory::close() {
  if (address_ == 0) return;
  CudaScope scope(*device_, std::nothrow);
  if (scope.entered()) (void)device_->driver().free(std::exchange(address_, 0));
}

std::string DeviceMemory::ipc_handle() const {
  CudaScope scope(*device_);
  CuIpcHandle handle;
  device_->driver().check(device_->driver().ipc_handle(&handle, address_), "cuIpcGetMemHandle");
  return {handle.bytes, sizeof handle.bytes};
}

void DeviceMemory::copy(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t host, bool to_device) const {
  if (address_ == 0 || offset > nbytes_ || nbytes > nbytes_ - offset)
    throw std::invalid_argument("outside the GPU memory, or it is closed");
  CudaStream stream(*device_);
  CudaScope scope(*device_);
  const CuAddress here = address_ + offset;
  device_->driver().check(
      device_->driver().copy(to_device ? here : host, to_device ? host : here, nbytes, stream.handle()),
      "cuMemcpyAsync");
  stream.wait();
}

void DeviceMemory::read(std::uint64_t offset, void* to, std::uint64_t nbytes) const {
  copy(offset, nbytes, reinterpret_cast<std::uint64_t>(to), false);
}

void DeviceMemory::write(std::uint64_t offset, const void* from, std::uint64_t nbytes) const {
  copy(offset, nbytes, reinterpret_cast<std::uint64_t>(from), true);
}

ExportedMemory export_memory(const CudaDevice& device, std::uint64_t address) {
  CudaScope scope(device);
  CuAddress start;
  std::size_t size;
  device.driver().check(device.driver().address_range(&start, &size, address), "cuMemGetAddressRange");
  CuIpcHandle handle;
  device.driver().check(device.driver().ipc_handle(&handle, start), "cuIpcGetMemHandle");
  return {{handle.bytes, sizeof handle.bytes}, address - start};
}

PinnedMemory::PinnedMemory(std::shared_ptr<CudaDevice> device, std::uint64_t address, std::uint64_t nbytes)
    : device_(std::move(device)), address_(address), nbytes_(nbytes) {
  const CudaDriver& driver = device_->driver();
  CudaScope scope(*device_);
  try {
    for (std::uint64_t done = 0; done < nbytes; done += kPinChunk) {
      const std::uint64_t size = std::min(kPinChunk, nbytes - done);
      if (int result = driver.host_register(reinterpret_cast<void*>(address + done), size, kPortable | kDeviceMap);
          result != kCudaSuccess)
        driver.fail(result, "cuMemHostRegister",
                    "pinning " + mebibytes(nbytes) + " of host memory stopped after " + mebibytes(done) +
                        " (memlock limit: " + memlock_limit() +
                        "; raise it with ulimit -l or --ulimit memlock, or take fewer pages)");
      chunks_.push_back(address + done);
      device_->add_pinned(address + done, size);
    }
  } catch (...) {
    close();
    throw;
  }
}

void PinnedMemory::close() {
  if (chunks_.empty()) return;
  CudaScope scope(*device_, std::nothrow);
  if (!scope.entered()) return;
  for (std::uint64_t chunk : std::exchange(chunks_, {})) {
    device_->remove_pinned(chunk);
    (void)device_->driver().host_unregister(reinterpret_cast<void*>(chunk));
  }
}

PeerMemory::PeerMemory(std::shared_ptr<CudaDevice> device, std::string handle, std::uint64_t offset,
                       std::uint64_t nbytes)
    : device_(std::move(device)), handle_(std::move(handle)) {
  const CuAddress base = device_->open_peer(handle_);
  try {
    CudaScope scope(*device_);
    CuAddress start;
    std::size_t size;
    device_->driver().check(device_->driver().address_range(&start, &size, base), "cuMemGetAddressRange");
    const std::uint64_t room = size - (base - start);
    if (offset > room || nbytes > room - offset)
      throw std::invalid_argument("import_peer: the peer's GPU memory is smaller than the pool that was announced");
    address_ = base + offset;
  } catch (...) {
    device_->close_peer(handle_);
    throw;
  }
}

}  // namespace kvrail

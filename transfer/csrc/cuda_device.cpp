// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.h"

#include <array>
#include <cstring>
#include <utility>

namespace kvrail {
namespace {

// CU_DEVICE_ATTRIBUTE_…
constexpr int kMultiprocessorCount = 16, kFlushWritesOptions = 117, kWritesOrdering = 118, kMpsEnabled = 133;
// A device of this ordering sees remote writes in order by itself.
constexpr int kOrderedForOwner = 100;
constexpr int kFlushByHost = 1, kFlushCurrentContext = 0, kFlushToOwner = 100;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kIpcLazyEnablePeerAccess = 1;
constexpr unsigned kThreads = 1024;

}  // namespace

CudaScope::CudaScope(const CudaDevice& device) : driver_(device.driver()), exempt_(driver_) {
  driver_.check(driver_.context_push(device.context()), "cuCtxPushCurrent");
}

CudaScope::CudaScope(const CudaDevice& device, std::nothrow_t) noexcept
    : driver_(device.driver()), exempt_(driver_), entered_(driver_.context_push(device.context()) == kCudaSuccess) {}

CudaScope::~CudaScope() {
  CuContext popped;
  if (entered_) (void)driver_.context_pop(&popped);
}

CudaStream::CudaStream(const CudaDevice& device, Priority priority) : device_(device) {
  const CudaDriver& driver = device.driver();
  CudaScope scope(device);
  int least, greatest;
  driver.check(driver.priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  driver.check(driver.stream_create(&handle_, kStreamNonBlocking, priority == Priority::least ? least : greatest),
               "cuStreamCreateWithPriority");
}

// Errors at the end of life are those of the device's last work, which was told where it was waited for; at the end of
// the process the driver may be gone already.
CudaStream::~CudaStream() {
  if (handle_ == nullptr) return;
  CaptureExempt exempt(device_.driver());
  (void)device_.driver().stream_destroy(handle_);
}

void CudaStream::wait() const {
  CaptureExempt exempt(device_.driver());
  device_.driver().check(device_.driver().stream_synchronize(handle_), "the GPU's work");
}

CudaEvent::CudaEvent(const CudaDevice& device, bool timed) : device_(device) {
  CudaScope scope(device);
  device.driver().check(device.driver().event_create(&handle_, timed ? 0 : kEventDisableTiming), "cuEventCreate");
}

CudaEvent::~CudaEvent() {
  if (handle_ == nullptr) return;
  CaptureExempt exempt(device_.driver());
  (void)device_.driver().event_destroy(handle_);
}

void CudaEvent::record(CuStream stream) {
  device_.driver().check(device_.driver().event_record(handle_, stream), "cuEventRecord");
}

bool CudaEvent::done() const {
  CaptureExempt exempt(device_.driver());
  int result = device_.driver().event_query(handle_);
  if (result == kCudaNotReady) return false;
  device_.driver().check(result, "the GPU's work");
  return true;
}

void CudaEvent::wait() const {
  CaptureExempt exempt(device_.driver());
  device_.driver().check(device_.driver().event_synchronize(handle_), "the GPU's work");
}

CudaDevice::CudaDevice(int ordinal) : driver_(CudaDriver::get()), ordinal_(ordinal) {
  int count = 0;
  driver_.check(driver_.device_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count)
    throw CudaError("CudaDevice", "CUDA_ERROR_INVALID_DEVICE",
                    "there is no CUDA device " + std::to_string(ordinal) + ", this process sees " +
                        std::to_string(count) + " (CUDA_VISIBLE_DEVICES)");
  driver_.check(driver_.device_get(&handle_, ordinal), "cuDeviceGet");
  std::array<char, 256> name{};
  driver_.check(driver_.device_name(name.data(), name.size(), handle_), "cuDeviceGetName");
  name_ = name.data();
  CuUuid uuid;
  driver_.check(driver_.device_uuid(&uuid, handle_), "cuDeviceGetUuid");
  uuid_.assign(uuid.bytes, sizeof uuid.bytes);
  driver_.check(driver_.device_attribute(&multiprocessors_, kMultiprocessorCount, handle_), "cuDeviceGetAttribute");
  int ordering = 0, options = 0;
  driver_.check(driver_.device_attribute(&ordering, kWritesOrdering, handle_), "cuDeviceGetAttribute");
  driver_.check(driver_.device_attribute(&options, kFlushWritesOptions, handle_), "cuDeviceGetAttribute");
  flushes_ = ordering < kOrderedForOwner && (options & kFlushByHost) != 0;
  int result = driver_.context_retain(&context_, handle_);
  if (result != kCudaSuccess)
    driver_.fail(result, "cuDevicePrimaryCtxRetain", "CUDA device " + std::to_string(ordinal) + " (" + name_ + ")");
}

CudaDevice::~CudaDevice() {
  if (module_ != nullptr) {
    CudaScope scope(*this, std::nothrow);
    if (scope.entered()) (void)driver_.module_unload(module_);
  }
  if (context_ != nullptr) (void)driver_.context_release(handle_);
}

std::shared_ptr<CudaFence> CudaDevice::record(CuStream stream) const {
  auto fence = std::make_shared<CudaFence>(shared_from_this());
  // The default stream is the current context's.
  CudaScope scope(*this);
  fence->event.record(stream);
  return fence;
}

void CudaDevice::hold(CuStream stream, const CudaFence& fence) const {
  CudaScope scope(*this);
  driver_.check(driver_.stream_wait(stream, fence.event.handle(), 0), "cuStreamWaitEvent");
}

void CudaDevice::copy(CuAddress target, CuAddress source, std::uint64_t nbytes, CuStream stream) const {
  CudaScope scope(*this);
  driver_.check(driver_.copy(target, source, nbytes, stream), "cuMemcpyAsync");
}

bool CudaDevice::shared_by_mps() const {
  int enabled = 0;
  // A driver that does not know the attribute cannot tell.
  return driver_.device_attribute(&enabled, kMpsEnabled, handle_) == kCudaSuccess && enabled != 0;
}

void CudaDevice::flush_remote_writes() const {
  if (!flushes_) return;
  CudaScope scope(*this);
  driver_.check(driver_.flush_writes(kFlushCurrentContext, kFlushToOwner), "cuFlushGPUDirectRDMAWrites");
}

void CudaDevice::load_kernels(const std::string& cubin) {
  CudaScope scope(*this);
  std::lock_guard lock(mutex_);
  if (module_ != nullptr) return;
  CuModule module;
  driver_.check(driver_.module_load(&module, cubin.data()), "cuModuleLoadData");
  Kernels found;
  for (auto [kernel, name] : {std::pair{&found.copy, "page_copy"}, std::pair{&found.sum, "page_sum"},
                              std::pair{&found.finish, "page_sum_finish"}}) {
    if (int result = driver_.module_function(kernel, module, name); result != kCudaSuccess) {
      (void)driver_.module_unload(module);
      driver_.fail(result, "cuModuleGetFunction", name);
    }
  }
  module_ = module;
  kernels_ = found;
}

CudaDevice::Kernels CudaDevice::kernels() const {
  std::lock_guard lock(mutex_);
  return kernels_;
}

void CudaDevice::launch(CuFunction kernel, unsigned blocks, CuStream stream, std::span<std::uint64_t> arguments) const {
  std::array<void*, 16> places;
  for (std::size_t i = 0; i < arguments.size(); ++i) places.at(i) = &arguments[i];
  driver_.check(driver_.launch(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, places.data(), nullptr),
                "cuLaunchKernel");
}

void CudaDevice::add_pinned(std::uint64_t address, std::uint64_t nbytes) {
  std::lock_guard lock(mutex_);
  pinned_[address] = address + nbytes;
}

void CudaDevice::remove_pinned(std::uint64_t address) {
  std::lock_guard lock(mutex_);
  pinned_.erase(address);
}

std::uint64_t CudaDevice::pinned_until(std::uint64_t address) const {
  std::lock_guard lock(mutex_);
  auto next = pinned_.upper_bound(address);
  if (next == pinned_.begin()) return 0;
  std::uint64_t end = std::prev(next)->second;
  return address < end ? end : 0;
}

bool CudaDevice::pinned(std::uint64_t address, std::uint64_t nbytes) const {
  const std::uint64_t end = address + nbytes;
  while (address < end) {
    address = pinned_until(address);
    if (address == 0) return false;
  }
  return true;
}

CuAddress CudaDevice::open_peer(const std::string& handle) {
  CuIpcHandle raw;
  if (handle.size() != sizeof raw.bytes)
    throw CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE", "an IPC handle has 64 bytes");
  std::memcpy(raw.bytes, handle.data(), sizeof raw.bytes);
  std::lock_guard lock(import_mutex_);
  if (auto found = imported_.find(handle); found != imported_.end()) {
    ++found->second.users;
    return found->second.address;
  }
  CudaScope scope(*this);
  CuAddress address;
  if (int result = driver_.ipc_open(&address, raw, kIpcLazyEnablePeerAccess); result != kCudaSuccess)
    driver_.fail(result, "cuIpcOpenMemHandle",
                 "the peer's GPU memory cannot be mapped on CUDA device " + std::to_string(ordinal_) +
                     " (both GPUs must be visible to this process and reach each other; not under MPS; both processes "
                     "in one IPC and PID namespace)");
  imported_[handle] = {address, 1};
  return address;
}

void CudaDevice::close_peer(const std::string& handle) {
  std::lock_guard lock(import_mutex_);
  auto found = imported_.find(handle);
  if (found == imported_.end() || --found->second.users > 0) return;
  CuAddress address = found->second.address;
  imported_.erase(found);
  CudaScope scope(*this, std::nothrow);
  // Of a peer that is gone as well: our mapping outlives it.
  if (scope.entered()) (void)driver_.ipc_close(address);
}

}  // namespace kvrail

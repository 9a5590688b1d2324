// SPDX-License-Identifier: Apache-2.0
// One CUDA device: its primary context (the one that torch uses as well), streams, events, the loaded kernels, and
// the books of what is pinned and of what is mapped from peers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda_driver.h"

namespace kvrail {

class CudaDevice;

// While it lives, calls of this thread neither fail because another thread captures a CUDA graph nor spoil that graph:
// the engine in our process may capture while we set up a link.
class CaptureExempt {
 public:
  explicit CaptureExempt(const CudaDriver& driver) : driver_(driver) { (void)driver_.capture_mode(&mode_); }
  ~CaptureExempt() { (void)driver_.capture_mode(&mode_); }
  CaptureExempt(const CaptureExempt&) = delete;
  CaptureExempt& operator=(const CaptureExempt&) = delete;

 private:
  const CudaDriver& driver_;
  // Ours at first, then the one that was there before.
  int mode_ = kCaptureRelaxed;
};

// The device's context is current on this thread while it lives, and the thread is exempt from captures.
class CudaScope {
 public:
  explicit CudaScope(const CudaDevice& device);
  // For destructors: where the driver is gone already, `entered` is false.
  CudaScope(const CudaDevice& device, std::nothrow_t) noexcept;
  ~CudaScope();
  CudaScope(const CudaScope&) = delete;
  CudaScope& operator=(const CudaScope&) = delete;

  bool entered() const { return entered_; }

 private:
  const CudaDriver& driver_;
  CaptureExempt exempt_;
  bool entered_ = true;
};

// A stream that the default stream neither waits for nor makes wait.
class CudaStream {
 public:
  // Whose kernels get an SM first where several streams want it. Engines compute at the least.
  enum class Priority { least, greatest };
  explicit CudaStream(const CudaDevice& device, Priority priority = Priority::greatest);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  CuStream handle() const { return handle_; }
  void wait() const;

 private:
  const CudaDevice& device_;
  CuStream handle_ = nullptr;
};

class CudaEvent {
 public:
  // `timed`: the time between two of them can be asked for.
  explicit CudaEvent(const CudaDevice& device, bool timed = false);
  CudaEvent(CudaEvent&& other) noexcept : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
  ~CudaEvent();
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  CuEvent handle() const { return handle_; }
  void record(CuStream stream);
  // Throws when the GPU's work failed.
  bool done() const;
  void wait() const;

 private:
  const CudaDevice& device_;
  CuEvent handle_ = nullptr;
};

// Behind everything that was on a stream when it was made. Holds its device.
struct CudaFence {
  explicit CudaFence(std::shared_ptr<const CudaDevice> owner, bool timed = false)
      : device(std::move(owner)), event(*device, timed) {}
  const std::shared_ptr<const CudaDevice> device;
  CudaEvent event;
};

class CudaDevice : public std::enable_shared_from_this<CudaDevice> {
 public:
  explicit CudaDevice(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Any thread.
  const CudaDriver& driver() const { return driver_; }
  CuContext context() const { return context_; }
  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  const std::string& uuid() const { return uuid_; }
  int multiprocessors() const { return multiprocessors_; }
  // MPS shares it: its server makes our writes, and goes on when this process is gone.
  bool shared_by_mps() const;
  // What network cards have written into its memory is visible to its kernels from here on.
  void flush_remote_writes() const;
  // For as long as the thread lives.
  void make_current() const { driver_.check(driver_.context_set(context_), "cuCtxSetCurrent"); }
  std::shared_ptr<CudaFence> record(CuStream stream) const;
  // What is put on the stream from now on runs behind the fence, which may be another device's.
  void hold(CuStream stream, const CudaFence& fence) const;
  // Within its own memory, in the order of the stream.
  void copy(CuAddress target, CuAddress source, std::uint64_t nbytes, CuStream stream) const;

  // The page kernels (kernels/csrc/page_copy.cu).
  struct Kernels {
    CuFunction copy = nullptr, sum = nullptr, finish = nullptr;
  };
  void load_kernels(const std::string& cubin);
  // All null before load_kernels.
  Kernels kernels() const;
  // With the context current. `arguments`: all of them 64 bits wide.
  void launch(CuFunction kernel, unsigned blocks, CuStream stream, std::span<std::uint64_t> arguments) const;

  // Where the pinned range that contains this address ends; 0 when none does.
  void add_pinned(std::uint64_t address, std::uint64_t nbytes);
  void remove_pinned(std::uint64_t address);
  std::uint64_t pinned_until(std::uint64_t address) const;
  bool pinned(std::uint64_t address, std::uint64_t nbytes) const;

  // A peer process's allocation, mapped here once however often it is asked for. Each open needs its close.
  CuAddress open_peer(const std::string& handle);
  void close_peer(const std::string& handle);

 private:
  struct Imported {
    CuAddress address;
    int users;
  };

  const CudaDriver& driver_;
  const int ordinal_;
  int handle_ = 0;
  CuContext context_ = nullptr;
  std::string name_, uuid_;
  int multiprocessors_ = 0;
  bool flushes_ = false;

  mutable std::mutex mutex_;
  CuModule module_ = nullptr;
  Kernels kernels_;
  std::map<std::uint64_t, std::uint64_t> pinned_;  // start → end
  std::mutex import_mutex_;                        // held over the driver's calls, which take a while
  std::map<std::string, Imported> imported_;
};

}  // namespace kvrail

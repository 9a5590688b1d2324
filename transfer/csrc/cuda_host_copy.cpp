// SPDX-License-Identifier: Apache-2.0
#include "cuda_host_copy.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvrail {
namespace {

// SMs that the kernel takes: they reach what PCIe gives (doc/kernels.md).
constexpr int kBlocks = 4;
// Runs from this length on go by copy engine. A call costs 3 µs of its time, those of 140 KiB (doc/gpu.md).
constexpr std::uint64_t kEngineRun = 4 << 20;
constexpr std::uint64_t kVector = 16;

}  // namespace

double HostCopy::seconds() const {
  const CudaDriver& driver = begun->device->driver();
  CudaScope scope(*begun->device);
  float milliseconds = 0;
  driver.check(driver.event_elapsed(&milliseconds, begun->event.handle(), ended->event.handle()), "cuEventElapsedTime");
  return milliseconds / 1e3;
}

HostCopies::HostCopies(std::shared_ptr<CudaDevice> device, bool to_host)
    : device_(std::move(device)),
      to_host_(to_host),
      stream_(*device_, to_host ? CudaStream::Priority::least : CudaStream::Priority::greatest),
      lists_(*device_, kPlaces * kPlaceBytes),
      mirror_(*device_, kPlaces * kPlaceBytes, stream_),
      counter_(*device_, sizeof(std::uint64_t), stream_) {
  if (device_->kernels().copy == nullptr) throw std::invalid_argument("HostCopies: load_kernels comes first");
  used_.reserve(kPlaces);
  for (std::size_t i = 0; i < kPlaces; ++i) used_.emplace_back(*device_);
}

HostCopies::~HostCopies() {
  CaptureExempt exempt(device_->driver());
  (void)device_->driver().stream_synchronize(stream_.handle());
}

void HostCopies::wait() { stream_.wait(); }

HostCopy HostCopies::copy(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets,
                          std::uint64_t nbytes, const CudaFence* after, HostWay way) {
  if (nbytes == 0 || nbytes % kVector != 0) throw std::invalid_argument("HostCopies: units are multiples of 16 bytes");
  find_runs(sources, targets, nbytes);
  for (const Run& run : runs_) check(run);
  const CudaDriver& driver = device_->driver();
  HostCopy made{std::make_shared<CudaFence>(device_, true), std::make_shared<CudaFence>(device_, true)};
  CudaScope scope(*device_);
  if (after != nullptr)
    driver.check(driver.stream_wait(stream_.handle(), after->event.handle(), 0), "cuStreamWaitEvent");
  made.begun->event.record(stream_.handle());
  if (way == HostWay::best)
    way = sources.size() * nbytes >= kEngineRun * runs_.size() ? HostWay::engine : HostWay::kernel;
  try {
    if (way == HostWay::engine) {
      copy_runs();
    } else {
      for (std::size_t first = 0; first < sources.size(); first += kPlaceUnits) {
        const std::size_t count = std::min(kPlaceUnits, sources.size() - first);
        launch(sources.subspan(first, count), targets.subspan(first, count), nbytes);
      }
    }
    made.ended->event.record(stream_.handle());
  } catch (const CudaError&) {
    // Part of it may be under way without an event that says when it is over.
    (void)driver.stream_synchronize(stream_.handle());
    throw;
  }
  return made;
}

void HostCopies::find_runs(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets,
                           std::uint64_t nbytes) {
  runs_.clear();
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if ((sources[i] | targets[i]) % kVector != 0)
      throw std::invalid_argument("HostCopies: addresses are multiples of 16");
    if (!runs_.empty() && runs_.back().source + runs_.back().nbytes == sources[i] &&
        runs_.back().target + runs_.back().nbytes == targets[i])
      runs_.back().nbytes += nbytes;
    else
      runs_.push_back({sources[i], targets[i], nbytes});
  }
}

// A kernel that meets memory which is not pinned breaks the context for good.
void HostCopies::check(const Run& run) const {
  if (!device_->pinned(to_host_ ? run.target : run.source, run.nbytes))
    throw std::invalid_argument("HostCopies: the host memory is not pinned for this GPU");
}

void HostCopies::copy_runs() {
  const CudaDriver& driver = device_->driver();
  for (Run& run : runs_) {
    while (run.nbytes > 0) {
      // The driver refuses a copy that reaches from one registration into the next.
      const std::uint64_t host = to_host_ ? run.target : run.source;
      const std::uint64_t piece = std::min(run.nbytes, device_->pinned_until(host) - host);
      driver.check(driver.copy(run.target, run.source, piece, stream_.handle()), "cuMemcpyAsync");
      run.source += piece;
      run.target += piece;
      run.nbytes -= piece;
    }
  }
}

void HostCopies::launch(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets,
                        std::uint64_t nbytes) {
  const CudaDriver& driver = device_->driver();
  const std::size_t place = std::exchange(next_place_, (next_place_ + 1) % kPlaces);
  // Sixteen lists back: over, unless the host is far ahead of the GPU.
  used_[place].wait();
  const std::uint64_t width = sources.size() * sizeof(std::uint64_t), at = place * kPlaceBytes;
  auto* list = reinterpret_cast<std::uint64_t*>(lists_.data() + at);
  std::copy(sources.begin(), sources.end(), list);
  std::copy(targets.begin(), targets.end(), list + sources.size());
  const CuAddress there = mirror_.address() + at;
  driver.check(driver.copy(there, lists_.address() + at, 2 * width, stream_.handle()), "cuMemcpyAsync");
  // A page stride of one byte makes the lists addresses.
  std::array<std::uint64_t, 15> arguments{0,
                                          there,
                                          1,
                                          0,
                                          0,
                                          0,
                                          there + width,
                                          1,
                                          0,
                                          0,
                                          sources.size(),
                                          1,
                                          nbytes,
                                          sizeof(std::uint64_t),
                                          counter_.address()};
  device_->launch(device_->kernels().copy, static_cast<unsigned>(std::min(kBlocks, device_->multiprocessors())),
                  stream_.handle(), arguments);
  used_[place].record(stream_.handle());
}

}  // namespace kvrail

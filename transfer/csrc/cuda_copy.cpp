// SPDX-License-Identifier: Apache-2.0
#include "cuda_copy.h"

#include <algorithm>
#include <utility>

#include "copy.h"

namespace kvrail {
namespace {

// SMs that a copy takes from what else the GPU does. Over NVLink 10 reach what all do, over PCIe 4 (doc/kernels.md).
constexpr int kBlocksFromGpu = 10, kBlocksFromHost = 4;
// For so few bytes the indices are read faster where they are than copied to the GPU first.
constexpr std::uint64_t kFewBytes = 256 << 10;
constexpr std::uint64_t kPlaceBytes = 2 * 32768 * sizeof(std::uint32_t);
// Two slices are over within this; what takes longer waits for a busy GPU.
constexpr Nanos kSpin = 3 * kMilli;
constexpr Nanos kNap = 20 * kMicro;

}  // namespace

CudaCopier::CudaCopier(std::shared_ptr<CudaDevice> device, Stats::Count& busy_ns)
    : device_(std::move(device)),
      busy_ns_(busy_ns),
      stream_(*device_),
      uploads_(*device_),
      indices_(*device_, kSlices * kPlaceBytes),
      mirror_(*device_, kSlices * kPlaceBytes, stream_),
      counter_(*device_, sizeof(std::uint64_t), stream_),
      events_{CudaEvent(*device_), CudaEvent(*device_)},
      uploaded_{CudaEvent(*device_), CudaEvent(*device_)} {
  static_assert(kPlaceBytes == 2 * kSliceUnits * sizeof(std::uint32_t));
}

CudaCopier::~CudaCopier() {
  CaptureExempt exempt(device_->driver());
  (void)device_->driver().stream_synchronize(stream_.handle());
}

const GpuSlice& CudaCopier::launch(std::shared_ptr<Writer> writer, const std::shared_ptr<Batch>& batch) {
  GpuSlice slice;
  slice.writer = std::move(writer);
  slice.batch = batch;
  const std::size_t place = next_place_;
  try {
    if (batch->way == Way::kernel)
      launch_kernel(*batch, place, slice);
    else
      launch_copies(*batch, slice);
    events_[place].record(stream_.handle());
  } catch (const CudaError&) {
    // Some of its copies may be under way without an event, and so may its index arrays.
    (void)device_->driver().stream_synchronize(uploads_.handle());
    (void)device_->driver().stream_synchronize(stream_.handle());
    throw;
  }
  next_place_ = (place + 1) % kSlices;
  const Nanos now = now_ns();
  if (running_.empty()) busy_since_ = now;
  running_.push_back({std::move(slice), place, now});
  return running_.back().slice;
}

std::uint64_t CudaCopier::slice_bytes(const Batch& batch) {
  return batch.region->is_host() ? kSliceFromHost : kSliceFromGpu;
}

void CudaCopier::launch_kernel(Batch& batch, std::size_t place, GpuSlice& slice) {
  const std::uint64_t size = batch.part.nbytes, stride = batch.pool->unit_bytes;
  const std::uint64_t fit = std::clamp<std::uint64_t>(slice_bytes(batch) / size, 1, kSliceUnits);
  const Batch::Units units = batch.take_units(static_cast<std::uint32_t>(fit));
  slice.units = units.count;
  slice.nbytes = units.count * size;
  const std::uint64_t width = units.count * sizeof(std::uint32_t);
  const std::uint64_t at = place * kPlaceBytes;
  auto* index = reinterpret_cast<std::uint32_t*>(indices_.data() + at);
  std::copy_n(units.sources, units.count, index);
  std::copy_n(units.targets, units.count, index + units.count);
  CuAddress lists = indices_.address() + at;
  if (slice.nbytes > kFewBytes) {
    const CudaDriver& driver = device_->driver();
    driver.check(driver.copy(mirror_.address() + at, lists, 2 * width, uploads_.handle()), "cuMemcpyAsync");
    uploaded_[place].record(uploads_.handle());
    driver.check(driver.stream_wait(stream_.handle(), uploaded_[place].handle(), 0), "cuStreamWaitEvent");
    lists = mirror_.address() + at;
  }
  std::array<std::uint64_t, 15> arguments{batch.source,
                                          lists,
                                          stride,
                                          batch.part.offset,
                                          0,
                                          batch.pool->peer->address(),
                                          lists + width,
                                          stride,
                                          batch.part.offset,
                                          0,
                                          units.count,
                                          1,
                                          size,
                                          sizeof(std::uint32_t),
                                          counter_.address()};
  const int blocks = batch.region->is_host() ? kBlocksFromHost : kBlocksFromGpu;
  device_->launch(device_->kernels().copy, static_cast<unsigned>(std::min(blocks, device_->multiprocessors())),
                  stream_.handle(), arguments);
}

void CudaCopier::launch_copies(Batch& batch, GpuSlice& slice) {
  const CudaDriver& driver = device_->driver();
  take_slice(batch, slice_bytes(batch), runs_, kSliceRuns);
  for (Run& run : runs_) {
    slice.units += run.units;
    slice.nbytes += run.nbytes;
    while (run.nbytes > 0) {
      std::uint64_t piece = run.nbytes;
      // The driver refuses a copy that reaches from one registration into the next.
      if (batch.region->is_host()) piece = std::min(piece, device_->pinned_until(run.source) - run.source);
      driver.check(driver.copy(batch.pool->peer->address() + run.target, run.source, piece, stream_.handle()),
                   "cuMemcpyAsync");
      run.source += piece;
      run.target += piece;
      run.nbytes -= piece;
    }
  }
}

unsigned CudaCopier::poll(const std::function<void(GpuSlice)>& over) {
  unsigned count = 0;
  while (!running_.empty()) {
    std::string error;
    try {
      if (!events_[running_.front().place].done()) break;
    } catch (const CudaError& failed) {
      error = failed.what();
    }
    GpuSlice slice = std::move(running_.front().slice);
    running_.pop_front();
    slice.error = std::move(error);
    ++count;
    if (running_.empty()) busy_ns_ += static_cast<std::uint64_t>(now_ns() - busy_since_);
    over(std::move(slice));
  }
  return count;
}

Nanos CudaCopier::nap(Nanos now) const {
  if (running_.empty()) return std::numeric_limits<Nanos>::max();
  return now - running_.front().launched < kSpin ? 0 : kNap;
}

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// Copies on the GPU into a peer's mapped memory: by the page-copy kernel, or by the copy engine, a slice at a time.
//
// One high-priority stream a reactor. A slice is launched when the ticket allows it and the fence of its batch is
// done, and it is over when the event behind it is done; never before do its units count, its index arrays get used
// again, or its writer become quiet.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "batch.h"
#include "clock.h"
#include "cuda_scratch.h"
#include "stats.h"

namespace kvrail {

class Writer;

// A slice that is over. `error` says why it failed; then it is unknown what of it was written.
struct GpuSlice {
  std::shared_ptr<Writer> writer;
  std::shared_ptr<Batch> batch;  // holds the peer's mapping
  std::uint32_t units = 0;
  std::uint64_t nbytes = 0;
  std::string error;
};

class CudaCopier {
 public:
  // `busy_ns` grows by the time in which copies were under way.
  CudaCopier(std::shared_ptr<CudaDevice> device, Stats::Count& busy_ns);
  // Waits for what is under way.
  ~CudaCopier();

  const CudaDevice& device() const { return *device_; }

  // The reactor's thread, on which the context is current.
  bool open() const { return running_.size() < kSlices; }
  // Takes the next slice of the batch and puts it on the stream. Throws CudaError; then nothing of it is under way any
  // more, and nobody knows what was written.
  const GpuSlice& launch(std::shared_ptr<Writer> writer, const std::shared_ptr<Batch>& batch);
  // Hands over the slices that are over; how many.
  unsigned poll(const std::function<void(GpuSlice)>& over);
  // How long the thread may sleep before the next poll. Nothing wakes it: a callback that the driver would run on a
  // thread of its own comes later than a look at the event.
  Nanos nap(Nanos now) const;

 private:
  // One runs, one waits behind it. With the sizes below they bound how long a stop, or another writer's page, has to
  // wait: one and a half milliseconds over NVLink, two and a half over PCIe. Each launch costs the time of 3 MiB over
  // NVLink, in which the link idles.
  static constexpr std::size_t kSlices = 2;
  static constexpr std::uint64_t kSliceFromGpu = 256 << 20, kSliceFromHost = 64 << 20;
  static constexpr std::uint32_t kSliceUnits = 32768;
  static constexpr std::size_t kSliceRuns = 256;

  struct Running {
    GpuSlice slice;
    std::size_t place;
    Nanos launched;
  };

  static std::uint64_t slice_bytes(const Batch& batch);
  void launch_kernel(Batch& batch, std::size_t place, GpuSlice& slice);
  void launch_copies(Batch& batch, GpuSlice& slice);

  const std::shared_ptr<CudaDevice> device_;
  Stats::Count& busy_ns_;
  Nanos busy_since_ = 0;
  CudaStream stream_;
  // Index arrays go to the GPU beside the kernel before theirs, not after it.
  CudaStream uploads_;
  // Each place has the index arrays of one slice: source units, then target units.
  HostScratch indices_;
  DeviceScratch mirror_;
  DeviceScratch counter_;
  std::array<CudaEvent, kSlices> events_, uploaded_;
  std::vector<Run> runs_;
  std::size_t next_place_ = 0;
  std::deque<Running> running_;
};

}  // namespace kvrail

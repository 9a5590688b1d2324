// SPDX-License-Identifier: Apache-2.0
// Copies of listed units between this GPU's memory and pinned host memory, one way, on a stream of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cuda_scratch.h"

namespace kvrail {

// By the page-copy kernel, which is fast for units of any size and takes a few SMs, or by the copy engine, which takes
// none and needs long runs. `best`: by how long the runs are.
enum class HostWay { best, kernel, engine };

// One call of HostCopies::copy. Two points on its stream; between them nothing but the copy.
struct HostCopy {
  std::shared_ptr<CudaFence> begun, ended;
  // Between the two, once the copy is done.
  double seconds() const;
};

class HostCopies {
 public:
  // `to_host`: sources are on the GPU. Then nobody waits for it, and its kernels come after all others; else a request
  // does, and they come first.
  HostCopies(std::shared_ptr<CudaDevice> device, bool to_host);
  // Waits for what is under way.
  ~HostCopies();

  // One thread at a time. Queues the copy of each of the `sources` to its target (addresses, multiples of 16, as are
  // `nbytes`), behind `after`. Throws std::invalid_argument when the host's side is not pinned, with nothing queued.
  HostCopy copy(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets, std::uint64_t nbytes,
                const CudaFence* after, HostWay way);
  // Behind every copy so far.
  std::shared_ptr<CudaFence> record() const { return device_->record(stream_.handle()); }
  void wait();

 private:
  struct Run {
    std::uint64_t source, target, nbytes;
  };
  // A kernel's list of addresses, on its way to the GPU and there.
  static constexpr std::size_t kPlaces = 16, kPlaceUnits = 4096;
  static constexpr std::uint64_t kPlaceBytes = 2 * kPlaceUnits * sizeof(std::uint64_t);

  void find_runs(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets, std::uint64_t nbytes);
  void check(const Run& run) const;
  void copy_runs();
  void launch(std::span<const std::uint64_t> sources, std::span<const std::uint64_t> targets, std::uint64_t nbytes);

  const std::shared_ptr<CudaDevice> device_;
  const bool to_host_;
  CudaStream stream_;
  HostScratch lists_;
  DeviceScratch mirror_;
  DeviceScratch counter_;
  std::vector<CudaEvent> used_;
  std::size_t next_place_ = 0;
  std::vector<Run> runs_;
};

}  // namespace kvrail

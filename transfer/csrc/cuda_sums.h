// SPDX-License-Identifier: Apache-2.0
// Checksums (checksum.h) of pages in GPU memory, computed there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "cuda_scratch.h"

namespace kvrail {

class CudaSums {
 public:
  explicit CudaSums(std::shared_ptr<CudaDevice> device);

  // Any thread; waits for the result. `page_bytes` is a multiple of 16. Indices are not checked.
  void sum(CuAddress base, std::uint64_t page_bytes, const std::uint32_t* pages, std::size_t count,
           const CudaFence* after, std::uint64_t* sums);

 private:
  const std::shared_ptr<CudaDevice> device_;
  // Kept, because giving GPU memory back waits for everything that the GPU does.
  std::mutex mutex_;
  CudaStream stream_;
  HostScratch host_;
  DeviceScratch scratch_;
};

}  // namespace kvrail

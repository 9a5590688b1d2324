// SPDX-License-Identifier: Apache-2.0
#include "cuda_sums.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace kvrail {
namespace {

// Pages that are summed at a time, and the SMs for it.
constexpr std::size_t kPages = 16384;
constexpr int kBlocks = 32;
// Both scratch memories: indices, sums; on the GPU the counter of the kernel as well.
constexpr std::uint64_t kSumsAt = kPages * sizeof(std::uint32_t);
constexpr std::uint64_t kCounterAt = kSumsAt + kPages * sizeof(std::uint64_t);

}  // namespace

CudaSums::CudaSums(std::shared_ptr<CudaDevice> device)
    : device_(std::move(device)),
      stream_(*device_),
      host_(*device_, kCounterAt),
      scratch_(*device_, kCounterAt + sizeof(std::uint64_t), stream_) {}

void CudaSums::sum(CuAddress base, std::uint64_t page_bytes, const std::uint32_t* pages, std::size_t count,
                   const CudaFence* after, std::uint64_t* sums) {
  const CudaDriver& driver = device_->driver();
  const CudaDevice::Kernels kernels = device_->kernels();
  if (kernels.sum == nullptr) throw std::invalid_argument("checksum_pages: load_kernels comes first");
  std::lock_guard lock(mutex_);
  CudaScope scope(*device_);
  CuStream stream = stream_.handle();
  if (after != nullptr) driver.check(driver.stream_wait(stream, after->event.handle(), 0), "cuStreamWaitEvent");
  const CuAddress index = scratch_.address(), sum = index + kSumsAt, counter = index + kCounterAt;
  for (std::size_t first = 0; first < count; first += kPages) {
    const std::uint64_t n = std::min(kPages, count - first);
    std::memcpy(host_.data(), pages + first, n * sizeof(std::uint32_t));
    driver.check(driver.copy(index, host_.address(), n * sizeof(std::uint32_t), stream), "cuMemcpyAsync");
    driver.check(driver.set_bytes(sum, 0, n * sizeof(std::uint64_t), stream), "cuMemsetD8Async");
    std::array<std::uint64_t, 11> add{base, index, page_bytes, 0, 0, n, 1, page_bytes, 4, counter, sum};
    device_->launch(kernels.sum, static_cast<unsigned>(std::min(kBlocks, device_->multiprocessors())), stream, add);
    std::array<std::uint64_t, 3> finish{sum, n, page_bytes};
    device_->launch(kernels.finish, 1, stream, finish);
    driver.check(driver.copy(host_.address() + kSumsAt, sum, n * sizeof(std::uint64_t), stream), "cuMemcpyAsync");
    stream_.wait();
    std::memcpy(sums + first, host_.data() + kSumsAt, n * sizeof(std::uint64_t));
  }
}

}  // namespace kvrail

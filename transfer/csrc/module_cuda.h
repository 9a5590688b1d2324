// SPDX-License-Identifier: Apache-2.0
// The CUDA part of what Python sees.
#pragma once

#include <nanobind/nanobind.h>

namespace kvrail {

// CudaDevice, DeviceMemory, PinnedMemory, CudaFence, and CudaError as kvrail.transfer.errors.CudaFailed.
void bind_cuda(nanobind::module_& m);

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// The one clock of the native code: CLOCK_MONOTONIC in nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvrail {

using Nanos = std::int64_t;

inline constexpr Nanos kMicro = 1'000, kMilli = 1'000'000, kSecond = 1'000'000'000;

inline Nanos now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace kvrail

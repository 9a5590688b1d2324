// SPDX-License-Identifier: Apache-2.0
// The 64-bit checksum of a page.
//
// With the page's n little-endian 64-bit words w_0 … w_{n-1} (n ≥ 1), everything modulo 2^64:
//
//   mix(x)    = z ^ (z >> 29)  where  z = (x ^ (x >> 32)) * 0x9FB21C651E98DF25
//   sum       = Σ mix(w_i + (i + 1) * 0x9E3779B97F4A7C15)
//   checksum  = mix(sum + 8 * n)
//
// The words may be summed in any order, so a GPU kernel can give each thread some of them. mix is a
// bijection: changing one word always changes the sum; the index inside makes moved words visible.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvrail {

inline constexpr std::uint64_t kChecksumStep = 0x9E3779B97F4A7C15u;
inline constexpr std::uint64_t kChecksumFactor = 0x9FB21C651E98DF25u;

constexpr std::uint64_t checksum_mix(std::uint64_t x) {
  std::uint64_t z = (x ^ (x >> 32)) * kChecksumFactor;
  return z ^ (z >> 29);
}

// `nbytes` is a multiple of 8.
std::uint64_t checksum(const void* data, std::size_t nbytes);

}  // namespace kvrail

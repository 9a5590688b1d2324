// SPDX-License-Identifier: Apache-2.0
// What goes over the connection of lane stream. doc/protocol.md tells it in words.
//
// The writer says the secret, then frames: this header, `runs` runs, and `nbytes` bytes, which are those of the runs
// in their order. When all of a frame is in its place the reader answers with the frame's number, 8 bytes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvrail {

static_assert(std::endian::native == std::endian::little, "frames are sent as they lie in memory");

struct StreamFrame {
  // "KVS", and the version of all this.
  static constexpr std::uint32_t kMagic = 0x0153564b;
  std::uint32_t magic;
  std::uint32_t pool;
  std::uint64_t number;  // 1, 2, … on a connection
  std::uint64_t unit_bytes;
  std::uint64_t nbytes;
  std::uint32_t runs;
  std::uint32_t zero;
};
static_assert(sizeof(StreamFrame) == 40);

// Whole units that are neighbours, or a piece of one unit.
struct StreamRun {
  std::uint64_t offset;  // in the reader's pool
  std::uint64_t nbytes;
};
static_assert(sizeof(StreamRun) == 16);

// With the header and the list before them they are one vector (IOV_MAX is 1024).
inline constexpr std::size_t kStreamMostRuns = 1023;
inline constexpr std::size_t kStreamSecretBytes = 32;
using StreamSecret = std::array<char, kStreamSecretBytes>;

// Takes as long wherever they differ.
inline bool same_secret(const StreamSecret& one, const StreamSecret& other) {
  unsigned different = 0;
  for (std::size_t i = 0; i < one.size(); ++i) different |= static_cast<unsigned char>(one[i] ^ other[i]);
  return different == 0;
}

}  // namespace kvrail

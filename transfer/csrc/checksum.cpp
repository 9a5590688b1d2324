// SPDX-License-Identifier: Apache-2.0
#include "checksum.h"

#include <bit>
#include <cstring>

namespace kvrail {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

using Sum = std::uint64_t (*)(const char* data, std::size_t words);

// Written once; each function below has the compiler vectorise it for another instruction set.
[[gnu::always_inline]] inline std::uint64_t sum_words(const char* data, std::size_t words) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < words; ++i) {
    std::uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    sum += checksum_mix(word + (i + 1) * kChecksumStep);
  }
  return sum;
}

std::uint64_t sum_portable(const char* data, std::size_t words) { return sum_words(data, words); }

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512dq,prefer-vector-width=512"))) std::uint64_t sum_avx512(const char* data,
                                                                                             std::size_t words) {
  return sum_words(data, words);
}
#endif

Sum choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return sum_avx512;
#endif
  return sum_portable;
}

const Sum kSum = choose();

}  // namespace

std::uint64_t checksum(const void* data, std::size_t nbytes) {
  return checksum_mix(kSum(static_cast<const char*>(data), nbytes / 8) + nbytes);
}

}  // namespace kvrail

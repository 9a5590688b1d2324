// SPDX-License-Identifier: Apache-2.0
#include "stream_copy.h"

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvrail {
namespace {

using Copy = void (*)(char* target, const char* source, std::size_t nbytes);

void copy_plain(char* target, const char* source, std::size_t nbytes) { std::memcpy(target, source, nbytes); }

#if defined(__x86_64__)

// Whole cache lines go to a line-aligned target: a line that non-temporal stores write only in part costs a
// read of memory. The ends go by memcpy. Four streams, a small page of memory apart, keep more prefetchers
// and more misses busy than one: half as fast again. Software prefetch only slows this down.
constexpr std::size_t kLine = 64;
constexpr std::size_t kStream = 4096;
constexpr std::size_t kStreams = 4;

void copy_lines_sse2(char* to, const char* from, std::size_t n) {
  for (std::size_t i = 0; i < n; i += kLine) {
    const auto* in = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(out + k, _mm_loadu_si128(in + k));
  }
}

[[gnu::target("avx"), gnu::always_inline]] inline void move_avx(char* to, const char* from) {
  __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
}

[[gnu::target("avx")]] void copy_lines_avx(char* to, const char* from, std::size_t n) {
  for (; n >= kStream * kStreams; n -= kStream * kStreams, to += kStream * kStreams, from += kStream * kStreams)
    for (std::size_t i = 0; i < kStream; i += kLine)
      for (std::size_t k = 0; k < kStreams; ++k) move_avx(to + k * kStream + i, from + k * kStream + i);
  for (std::size_t i = 0; i < n; i += kLine) move_avx(to + i, from + i);
}

[[gnu::target("avx512f"), gnu::always_inline]] inline void move_avx512(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

[[gnu::target("avx512f")]] void copy_lines_avx512(char* to, const char* from, std::size_t n) {
  for (; n >= kStream * kStreams; n -= kStream * kStreams, to += kStream * kStreams, from += kStream * kStreams)
    for (std::size_t i = 0; i < kStream; i += kLine)
      for (std::size_t k = 0; k < kStreams; ++k) move_avx512(to + k * kStream + i, from + k * kStream + i);
  for (std::size_t i = 0; i < n; i += kLine) move_avx512(to + i, from + i);
}

template <Copy lines>
void copy_aligned(char* target, const char* source, std::size_t nbytes) {
  std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
  if (nbytes < head + kLine) return copy_plain(target, source, nbytes);
  std::memcpy(target, source, head);
  std::size_t body = (nbytes - head) / kLine * kLine;
  lines(target + head, source + head, body);
  std::memcpy(target + head + body, source + head + body, nbytes - head - body);
}

#endif

struct Kind {
  const char* name;
  Copy copy;
};

Kind choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512", copy_aligned<copy_lines_avx512>};
  if (__builtin_cpu_supports("avx")) return {"avx", copy_aligned<copy_lines_avx>};
  return {"sse2", copy_aligned<copy_lines_sse2>};
#else
  return {"memcpy", copy_plain};
#endif
}

const Kind kKind = choose();

}  // namespace

void stream_copy(void* target, const void* source, std::size_t nbytes) {
  kKind.copy(static_cast<char*>(target), static_cast<const char*>(source), nbytes);
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  asm volatile("dmb ish" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

const char* stream_copy_kind() { return kKind.name; }

}  // namespace kvrail

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

// Each loop moves whole cache lines to a line-aligned target: a line that is written in part by non-temporal
// stores costs a read of memory. The ends go by memcpy.
constexpr std::size_t kLine = 64;

template <typename Lines>
inline void copy_aligned(char* target, const char* source, std::size_t nbytes, Lines lines) {
  std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
  if (nbytes < head + kLine) return copy_plain(target, source, nbytes);
  std::memcpy(target, source, head);
  std::size_t body = (nbytes - head) / kLine * kLine;
  lines(target + head, source + head, body);
  std::memcpy(target + head + body, source + head + body, nbytes - head - body);
}

void copy_sse2(char* target, const char* source, std::size_t nbytes) {
  copy_aligned(target, source, nbytes, [](char* to, const char* from, std::size_t n) {
    for (std::size_t i = 0; i < n; i += kLine) {
      _mm_prefetch(from + i + 512, _MM_HINT_NTA);
      const auto* in = reinterpret_cast<const __m128i*>(from + i);
      auto* out = reinterpret_cast<__m128i*>(to + i);
      __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
              d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
  });
}

__attribute__((target("avx"))) void copy_lines_avx(char* to, const char* from, std::size_t n) {
  for (std::size_t i = 0; i < n; i += kLine) {
    _mm_prefetch(from + i + 512, _MM_HINT_NTA);
    __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
  }
}

void copy_avx(char* target, const char* source, std::size_t nbytes) {
  copy_aligned(target, source, nbytes, copy_lines_avx);
}

__attribute__((target("avx512f"))) void copy_lines_avx512(char* to, const char* from, std::size_t n) {
  for (std::size_t i = 0; i < n; i += kLine) {
    _mm_prefetch(from + i + 512, _MM_HINT_NTA);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
}

void copy_avx512(char* target, const char* source, std::size_t nbytes) {
  copy_aligned(target, source, nbytes, copy_lines_avx512);
}

#endif

struct Kind {
  const char* name;
  Copy copy;
};

Kind choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"avx512", copy_avx512};
  if (__builtin_cpu_supports("avx")) return {"avx", copy_avx};
  return {"sse2", copy_sse2};
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

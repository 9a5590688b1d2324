// SPDX-License-Identifier: Apache-2.0
// memcpy that does not read, or keep, the target's lines in the cache (non-temporal stores).
//
// The stores are weakly ordered: whoever copied calls stream_fence() before it tells anyone that the bytes
// are there.
#pragma once

#include <cstddef>

namespace kvrail {

void stream_copy(void* target, const void* source, std::size_t nbytes);
void stream_fence();
// "avx512", "avx", "sse2" or "memcpy": what stream_copy uses on this machine.
const char* stream_copy_kind();

}  // namespace kvrail

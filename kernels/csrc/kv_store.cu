// SPDX-License-Identifier: Apache-2.0
// Puts K and V of single tokens into a page pool. A token without a place (a row that only fills up a batch)
// writes nothing at all: no page is needed to take what nobody wants.
//
// One block a token. `places` says for each token how many rows behind `k_base` and `v_base` it goes (rows of
// `row_vectors` * 16 bytes, counted over the whole pool), or is negative.
//
// Compiled by NVRTC: no headers, every parameter 64 bits wide.

namespace {

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr i64 kVectorBytes = 16;

struct alignas(16) Vector {
  u32 words[4];
};

}  // namespace

// Strides of key and value are in bytes; heads are contiguous, of `head_vectors` vectors each. `k_base` and
// `v_base`: where the layer's K and V rows of page 0 begin.
extern "C" __global__ void kv_store(u64 key, u64 value, u64 k_base, u64 v_base, u64 places, i64 key_token, i64 key_head,
                                    i64 value_token, i64 value_head, i64 head_vectors, i64 row_vectors) {
  const i64 token = blockIdx.x;
  const i64 place = reinterpret_cast<const i64*>(places)[token];
  if (place < 0) return;
  const i64 row = place * row_vectors * kVectorBytes;
  for (i64 vector = threadIdx.x; vector < row_vectors; vector += blockDim.x) {
    const i64 head = vector / head_vectors;
    const i64 within = (vector - head * head_vectors) * kVectorBytes;
    const Vector k = *reinterpret_cast<const Vector*>(key + token * key_token + head * key_head + within);
    const Vector v = *reinterpret_cast<const Vector*>(value + token * value_token + head * value_head + within);
    *reinterpret_cast<Vector*>(k_base + row + vector * kVectorBytes) = k;
    *reinterpret_cast<Vector*>(v_base + row + vector * kVectorBytes) = v;
  }
}

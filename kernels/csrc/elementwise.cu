// SPDX-License-Identifier: Apache-2.0
// What stands between the matrix products of a decoder layer, one launch each: root-mean-square norm, rotary
// positions, gated activation. bfloat16 or float16 in memory, float32 inside, rounded once.
//
// Everything is read and written in vectors of 16 bytes. Compiled by NVRTC: no headers, every parameter 64
// bits wide.

namespace {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr i64 kLane = 32;
constexpr i64 kWidth = 8;  // numbers in a vector

struct Bfloat16 {
  static __device__ __forceinline__ float widen(u16 bits) { return __uint_as_float(u32(bits) << 16); }
  static __device__ __forceinline__ u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct Float16 {
  static __device__ __forceinline__ float widen(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  static __device__ __forceinline__ u16 narrow(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
};

struct alignas(16) Vector {
  u16 bits[kWidth];
};

template <class Kind>
__device__ __forceinline__ void load(float (&into)[kWidth], u64 address) {
  const Vector vector = *reinterpret_cast<const Vector*>(address);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) into[i] = Kind::widen(vector.bits[i]);
}

template <class Kind>
__device__ __forceinline__ void store(u64 address, const float (&from)[kWidth]) {
  Vector vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) vector.bits[i] = Kind::narrow(from[i]);
  *reinterpret_cast<Vector*>(address) = vector;
}

// The sum over all threads of the block, which are whole warps.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[32];
  for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % kLane == 0) sums[threadIdx.x / kLane] = value;
  __syncthreads();
  value = threadIdx.x % kLane < blockDim.x / kLane ? sums[threadIdx.x % kLane] : 0.0f;
  for (int lane = 16; lane; lane >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

// One block a row.
template <class Kind>
__device__ __forceinline__ void norm(u64 x, u64 weight, u64 out, i64 stride, i64 vectors, float epsilon) {
  const u64 row = x + blockIdx.x * stride, target = out + blockIdx.x * vectors * sizeof(Vector);
  float sum = 0.0f;
  float values[kWidth], weights[kWidth];
  for (i64 at = threadIdx.x; at < vectors; at += blockDim.x) {
    load<Kind>(values, row + at * sizeof(Vector));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += values[i] * values[i];
  }
  const float scale = rsqrtf(block_sum(sum) / float(vectors * kWidth) + epsilon);
  for (i64 at = threadIdx.x; at < vectors; at += blockDim.x) {
    load<Kind>(values, row + at * sizeof(Vector));
    load<Kind>(weights, weight + at * sizeof(Vector));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] *= scale * weights[i];
    store<Kind>(target + at * sizeof(Vector), values);
  }
}

// One block a token. Heads of 2 * `half` vectors lie one behind the other; both halves of a head turn together.
template <class Kind>
__device__ __forceinline__ void rotate(u64 x, u64 cosines, u64 sines, i64 stride, i64 heads, i64 half) {
  const u64 row = x + blockIdx.x * stride;
  const u64 angles = blockIdx.x * 2 * half * sizeof(Vector);
  for (i64 at = threadIdx.x; at < heads * half; at += blockDim.x) {
    const i64 head = at / half, vector = at - head * half;
    const u64 first = row + (head * 2 * half + vector) * sizeof(Vector);
    const u64 second = first + half * sizeof(Vector);
    const u64 angle = angles + vector * sizeof(Vector);
    float a[kWidth], b[kWidth], c[kWidth], s[kWidth], turned[kWidth];
    load<Kind>(a, first);
    load<Kind>(b, second);
    load<Kind>(c, cosines + angle);
    load<Kind>(s, sines + angle);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) turned[i] = a[i] * c[i] - b[i] * s[i];
    store<Kind>(first, turned);
    load<Kind>(c, cosines + angle + half * sizeof(Vector));
    load<Kind>(s, sines + angle + half * sizeof(Vector));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) turned[i] = b[i] * c[i] + a[i] * s[i];
    store<Kind>(second, turned);
  }
}

// A row is `vectors` of the gate and as many that it lets through: out = gate * sigmoid(gate) * let through.
template <class Kind>
__device__ __forceinline__ void gate(u64 x, u64 out, i64 vectors) {
  const i64 at = i64(blockIdx.y) * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  const u64 from = x + (blockIdx.x * 2 * vectors + at) * sizeof(Vector);
  float gates[kWidth], values[kWidth];
  load<Kind>(gates, from);
  load<Kind>(values, from + vectors * sizeof(Vector));
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= gates[i] / (1.0f + expf(-gates[i]));
  store<Kind>(out + (blockIdx.x * vectors + at) * sizeof(Vector), values);
}

}  // namespace

// Strides are in bytes.
extern "C" __global__ void norm_bfloat16(u64 x, u64 weight, u64 out, i64 stride, i64 vectors, double epsilon) {
  norm<Bfloat16>(x, weight, out, stride, vectors, float(epsilon));
}
extern "C" __global__ void norm_float16(u64 x, u64 weight, u64 out, i64 stride, i64 vectors, double epsilon) {
  norm<Float16>(x, weight, out, stride, vectors, float(epsilon));
}
extern "C" __global__ void rotate_bfloat16(u64 x, u64 cosines, u64 sines, i64 stride, i64 heads, i64 half) {
  rotate<Bfloat16>(x, cosines, sines, stride, heads, half);
}
extern "C" __global__ void rotate_float16(u64 x, u64 cosines, u64 sines, i64 stride, i64 heads, i64 half) {
  rotate<Float16>(x, cosines, sines, stride, heads, half);
}
extern "C" __global__ void gate_bfloat16(u64 x, u64 out, i64 vectors) { gate<Bfloat16>(x, out, vectors); }
extern "C" __global__ void gate_float16(u64 x, u64 out, i64 vectors) { gate<Float16>(x, out, vectors); }

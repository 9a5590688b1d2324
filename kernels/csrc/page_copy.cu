// SPDX-License-Identifier: Apache-2.0
// Copies the listed pages, or the same parts of each, between any two memories that one GPU can address: its
// own, a peer's that is mapped here, pinned host memory. Sums pages for their checksum, while copying or
// alone.
//
// A unit is `unit_bytes` of contiguous bytes, a multiple of 16. Entry e of the list has `segments` units on
// each side; segment s of entry e lies at
//     base + index[e] * page_stride + offset + s * segment_stride
// Whole pages: one segment, unit_bytes = page_bytes, offset 0. One layer's K and V of each page: one segment
// where they are neighbours, else two. A page stride of 1 makes the index array a list of byte offsets.
//
// Compiled by NVRTC: no headers, every parameter 64 bits wide.

namespace {

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kLanes = 32;
constexpr u32 kVectorBytes = 16;
// Loads that a thread issues before its first store. 8 x 16 bytes x 1024 threads cover the latency of NVLink
// and of PCIe with few SMs, and leave enough of the 64 registers that a thread has in a block of 1024. Short
// units need registers for their addresses.
constexpr u32 kLongDepth = 8;
constexpr u32 kShortDepth = 4;
// Vectors that a warp moves at a time: 4 KiB and 2 KiB.
constexpr u32 kLongChunk = kLanes * kLongDepth;
constexpr u32 kShortChunk = kLanes * kShortDepth;
// A warp takes 4 tasks at a time from a long list.
constexpr u32 kGrabShift = 2;

struct Side {
  char* base;
  const void* index;
  i64 page_stride;
  i64 offset;
  i64 segment_stride;
};

struct List {
  u32 entries;
  u32 segments;
  u32 vectors;  // of a unit
  bool wide;    // the index arrays hold int64, else uint32
  u32* counter;
};

struct Unit {
  u32 entry;
  u32 segment;
};

__device__ __forceinline__ Unit unit_at(const List& list, u32 number) {
  if (list.segments == 1) return {number, 0};
  const u32 entry = number / list.segments;
  return {entry, number - entry * list.segments};
}

// Where the unit begins inside its page.
__device__ __forceinline__ i64 place_in_page(const Side& side, Unit unit) {
  return side.offset + unit.segment * side.segment_stride;
}

__device__ __forceinline__ uint4* address(const Side& side, const List& list, Unit unit) {
  const i64 index = list.wide ? static_cast<const i64*>(side.index)[unit.entry]
                              : static_cast<i64>(static_cast<const u32*>(side.index)[unit.entry]);
  return reinterpret_cast<uint4*>(side.base + index * side.page_stride + place_in_page(side, unit));
}

// The checksum of a page, as transfer/csrc/checksum.h defines it: the sum of mix(word + (place + 1) * kStep)
// over its 64-bit words, then mix(sum + bytes). Sums may be taken in any order and in parts.
constexpr u64 kStep = 0x9E3779B97F4A7C15u;
constexpr u64 kFactor = 0x9FB21C651E98DF25u;

__device__ __forceinline__ u64 mix(u64 x) {
  const u64 z = (x ^ (x >> 32)) * kFactor;
  return z ^ (z >> 29);
}

// What the two words of a vector add to the sum of their page. `salt` is (place of the first + 1) * kStep.
__device__ __forceinline__ u64 vector_sum(uint4 vector, u64 salt) {
  const u64 first = (static_cast<u64>(vector.y) << 32) | vector.x;
  const u64 second = (static_cast<u64>(vector.w) << 32) | vector.z;
  return mix(first + salt) + mix(second + salt + kStep);
}

__device__ __forceinline__ u64 salt_at(i64 byte_in_page) { return (static_cast<u64>(byte_in_page) / 8 + 1) * kStep; }

__device__ __forceinline__ u64 warp_total(u64 value) {
#pragma unroll
  for (u32 half = kLanes / 2; half != 0; half /= 2) value += __shfl_xor_sync(~0u, value, half);
  return value;
}

// Hands tasks to warps: each has its first one at once, and takes the others as it becomes free. With equal
// shares instead, most SMs would be done and idle while the slowest still write: SMs reach a peer at
// different rates.
//
// `counter` is 0 in GPU memory when the kernel starts and 0 when it ends: grabs - 1 is the last value that
// atomicInc gives out before it wraps, and there is one fetch for each grab.
class Tasks {
 public:
  __device__ __forceinline__ Tasks(u32 count, u32* counter)
      : count_(count),
        counter_(counter),
        // In short lists every task goes alone, and neighbours to different SMs: one page is spread over all.
        shift_(count / warps() >= (4u << kGrabShift) ? kGrabShift : 0),
        task_((threadIdx.x / kLanes * gridDim.x + blockIdx.x) << shift_) {
    fetch();
  }

  // Whether there is a task, the same one for all lanes of the warp.
  __device__ __forceinline__ bool more() const { return task_ < count_; }
  __device__ __forceinline__ u32 task() const { return task_; }

  __device__ __forceinline__ void next() {
    ++task_;
    if ((task_ & ((1u << shift_) - 1)) != 0) return;
    task_ = grabs() > warps() ? (__shfl_sync(~0u, fetched_, 0) + warps()) << shift_ : count_;
    if (more()) fetch();
  }

 private:
  static __device__ __forceinline__ u32 warps() { return blockDim.x / kLanes * gridDim.x; }
  __device__ __forceinline__ u32 grabs() const { return (count_ + (1u << shift_) - 1) >> shift_; }

  // Nothing waits here: the answer is looked at when the tasks in hand are done.
  __device__ __forceinline__ void fetch() {
    if (grabs() > warps() && threadIdx.x % kLanes == 0) fetched_ = atomicInc(counter_, grabs() - 1);
  }

  u32 count_;
  u32* counter_;
  u32 shift_;
  u32 task_;
  u32 fetched_ = 0;
};

// Units of 2 KiB or more: a task is a chunk of one unit.
template <bool kStore, bool kSum>
__device__ void run_long_units(const Side& source, const Side& target, const List& list, u64* sums) {
  const u32 lane = threadIdx.x % kLanes;
  const u32 chunks = (list.vectors + kLongChunk - 1) / kLongChunk;
  const u32 count = list.entries * list.segments * chunks;
  for (Tasks tasks(count, list.counter); tasks.more(); tasks.next()) {
    const u32 task = tasks.task();
    const u32 number = task / chunks;
    const u32 first = (task - number * chunks) * kLongChunk + lane;
    const Unit unit = unit_at(list, number);
    const uint4* from = address(source, list, unit) + first;
    uint4* to = kStore ? address(target, list, unit) + first : nullptr;
    const u32 left = list.vectors > first ? list.vectors - first : 0;
    uint4 held[kLongDepth];
#pragma unroll
    for (u32 i = 0; i < kLongDepth; ++i) {
      if (i * kLanes < left) held[i] = __ldcs(from + i * kLanes);
    }
    u64 sum = 0;
    const u64 salt = kSum ? salt_at(place_in_page(target, unit) + static_cast<i64>(first) * kVectorBytes) : 0;
#pragma unroll
    for (u32 i = 0; i < kLongDepth; ++i) {
      if (i * kLanes < left) {
        if (kStore) __stcs(to + i * kLanes, held[i]);
        if (kSum) sum += vector_sum(held[i], salt + i * (kLanes * kVectorBytes / 8) * kStep);
      }
    }
    if (kSum) {
      sum = warp_total(sum);
      if (lane == 0) atomicAdd(sums + unit.entry, sum);
    }
  }
}

// Shorter units: a task is as many whole units as a chunk holds, so that few lanes idle even on 16-byte
// units.
template <bool kStore, bool kSum>
__device__ void run_short_units(const Side& source, const Side& target, const List& list, u64* sums) {
  const u32 lane = threadIdx.x % kLanes;
  const u32 units = list.entries * list.segments;
  const u32 units_a_task = kShortChunk / list.vectors;
  const u32 count = (units + units_a_task - 1) / units_a_task;
  // (j * inverse) >> 16 == j / vectors for every j < 128: the error stays under 1/512, less than 1/vectors.
  const u32 inverse = 65536 / list.vectors + 1;
  for (Tasks tasks(count, list.counter); tasks.more(); tasks.next()) {
    const u32 task = tasks.task();
    const u32 first = task * units_a_task;
    const u32 live = min(units_a_task, units - first) * list.vectors;
    uint4 held[kShortDepth];
#pragma unroll
    for (u32 i = 0; i < kShortDepth; ++i) {
      const u32 j = i * kLanes + lane;
      const u32 ordinal = j * inverse >> 16;
      if (j < live)
        held[i] = __ldcs(address(source, list, unit_at(list, first + ordinal)) + (j - ordinal * list.vectors));
    }
#pragma unroll
    for (u32 i = 0; i < kShortDepth; ++i) {
      const u32 j = i * kLanes + lane;
      const u32 ordinal = j * inverse >> 16;
      const u32 vector = j - ordinal * list.vectors;
      const Unit unit = unit_at(list, first + ordinal);
      if (kStore && j < live) __stcs(address(target, list, unit) + vector, held[i]);
      if (kSum) {
        u64 sum = 0;
        if (j < live) sum = vector_sum(held[i], salt_at(place_in_page(target, unit) + vector * kVectorBytes));
        // One atomic a warp where all its lanes are in one page, which is so for units of 512 bytes and their
        // multiples.
        int same = 0;
        __match_all_sync(~0u, unit.entry, &same);
        if (same) {
          sum = warp_total(sum);
          if (lane == 0 && j < live) atomicAdd(sums + unit.entry, sum);
        } else if (j < live) {
          atomicAdd(sums + unit.entry, sum);
        }
      }
    }
  }
}

template <bool kStore, bool kSum>
__device__ __forceinline__ void run(const Side& source, const Side& target, const List& list, u64* sums) {
  if (list.vectors >= kShortChunk) {
    run_long_units<kStore, kSum>(source, target, list, sums);
  } else {
    run_short_units<kStore, kSum>(source, target, list, sums);
  }
}

__device__ __forceinline__ Side side_of(u64 base, u64 index, i64 page_stride, i64 offset, i64 segment_stride) {
  return {reinterpret_cast<char*>(base), reinterpret_cast<const void*>(index), page_stride, offset, segment_stride};
}

__device__ __forceinline__ List list_of(i64 entries, i64 segments, i64 unit_bytes, i64 index_bytes, u64 counter) {
  return {static_cast<u32>(entries), static_cast<u32>(segments), static_cast<u32>(unit_bytes / kVectorBytes),
          index_bytes == 8, reinterpret_cast<u32*>(counter)};
}

}  // namespace

// `counter`, of every kernel that takes a list: the address of a u32 in GPU memory that is 0, that no other
// launch uses meanwhile, and that is 0 again afterwards.
extern "C" {

__global__ void __launch_bounds__(1024)
    page_copy(u64 source, u64 source_index, i64 source_stride, i64 source_offset, i64 source_segment, u64 target,
              u64 target_index, i64 target_stride, i64 target_offset, i64 target_segment, i64 entries, i64 segments,
              i64 unit_bytes, i64 index_bytes, u64 counter) {
  run<true, false>(side_of(source, source_index, source_stride, source_offset, source_segment),
                   side_of(target, target_index, target_stride, target_offset, target_segment),
                   list_of(entries, segments, unit_bytes, index_bytes, counter), nullptr);
}

// As page_copy; also adds to sums[e] what the bytes of entry e are worth at their place in the target page.
// The caller clears the sums before the first part of a page and finishes them after the last.
__global__ void __launch_bounds__(1024)
    page_copy_sum(u64 source, u64 source_index, i64 source_stride, i64 source_offset, i64 source_segment, u64 target,
                  u64 target_index, i64 target_stride, i64 target_offset, i64 target_segment, i64 entries, i64 segments,
                  i64 unit_bytes, i64 index_bytes, u64 counter, u64 sums) {
  run<true, true>(side_of(source, source_index, source_stride, source_offset, source_segment),
                  side_of(target, target_index, target_stride, target_offset, target_segment),
                  list_of(entries, segments, unit_bytes, index_bytes, counter), reinterpret_cast<u64*>(sums));
}

// The sums of pages where they lie, as page_copy_sum would have made them.
__global__ void __launch_bounds__(1024) page_sum(u64 pages, u64 index, i64 stride, i64 offset, i64 segment, i64 entries,
                                                 i64 segments, i64 unit_bytes, i64 index_bytes, u64 counter, u64 sums) {
  const Side side = side_of(pages, index, stride, offset, segment);
  run<false, true>(side, side, list_of(entries, segments, unit_bytes, index_bytes, counter),
                   reinterpret_cast<u64*>(sums));
}

// Turns the sums of whole pages into their checksums, in place.
__global__ void __launch_bounds__(1024) page_sum_finish(u64 sums, i64 entries, i64 page_bytes) {
  u64* sum = reinterpret_cast<u64*>(sums);
  for (i64 e = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; e < entries;
       e += static_cast<i64>(gridDim.x) * blockDim.x) {
    sum[e] = mix(sum[e] + static_cast<u64>(page_bytes));
  }
}

}  // extern "C"

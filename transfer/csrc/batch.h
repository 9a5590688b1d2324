// SPDX-License-Identifier: Apache-2.0
// One push: which units, or which part of each, go where, and a cursor that hands them out as runs contiguous on both
// sides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda_memory.h"
#include "mapping.h"
#include "memory.h"
#include "rkey.h"

namespace kvrail {

// How bytes reach a peer's pool: by UCX; by the CPU into mapped host memory; over a TCP connection of our own; by the
// GPU into mapped GPU memory, with its copy engine or with the page-copy kernel. `best`: whatever was imported.
enum class Way { best, put, shm, stream, engine, kernel };

// Ours: the CPU reads the source.
constexpr bool by_cpu(Way way) { return way == Way::shm || way == Way::stream; }

// A peer's pool, in the ways in which it was imported. Never changed after that: batches hold it.
struct Pool {
  std::uint64_t units;
  std::uint64_t unit_bytes;
  std::uint64_t base = 0;  // for puts
  std::shared_ptr<RemoteKey> key;
  std::string packed_key;  // the same, for rails
  std::shared_ptr<Mapping> mapping;
  bool stream = false;
  std::shared_ptr<PeerMemory> peer;
  bool kernel = false;  // `peer` is fit for the page-copy kernel
  Way last = Way::best;

  // Another import of the same pool adds a way; of the same id with another shape, it replaces the pool.
  void keep_ways_of(const Pool& older) {
    if (older.units != units || older.unit_bytes != unit_bytes) return;
    if (!key) {
      key = older.key;
      packed_key = older.packed_key;
      base = older.base;
    }
    if (!mapping) mapping = older.mapping;
    stream = stream || older.stream;
    if (!peer) {
      peer = older.peer;
      kernel = older.kernel;
    }
  }

  // The way to take for what was wished, or `best` when there is none.
  Way choose(Way wished) const {
    if (wished == Way::best) wished = peer ? kernel ? Way::kernel : Way::engine : last;
    return reached_by(wished) ? wished : Way::best;
  }

 private:
  bool reached_by(Way way) const {
    switch (way) {
      case Way::best:
        return false;
      case Way::put:
        return key != nullptr;
      case Way::shm:
        return mapping != nullptr;
      case Way::stream:
        return stream;
      case Way::engine:
        return peer != nullptr;
      case Way::kernel:
        return peer != nullptr && kernel;
    }
    return false;
  }
};

struct Run {
  std::uint64_t source;  // address
  std::uint64_t target;  // offset in the peer's pool
  std::uint64_t nbytes;
  std::uint32_t units;  // that are complete with this run (0 for a piece of a unit that is not its last)
};

// The bytes of each unit that are pushed; no bytes: all of them.
struct Part {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
};

class Batch {
 public:
  Batch(std::uint32_t pool, std::uint64_t source, std::vector<std::uint32_t> sources,
        std::vector<std::uint32_t> targets, Part part, Way way, std::shared_ptr<CudaFence> after, bool ends_push,
        std::uint32_t only_rail = 0)
      : pool_id(pool),
        source(source),
        sources(std::move(sources)),
        targets(std::move(targets)),
        part(part),
        way(way),
        after(std::move(after)),
        ends_push(ends_push),
        only_rail(only_rail) {}

  // Binds the batch to the peer's pool and to our registered memory. Returns why it cannot, or "": nothing
  // else in the system checks bounds, over tcp and cma a key protects nothing.
  std::string bind(std::shared_ptr<Pool> to, std::shared_ptr<Region> from) {
    // No early exit: so it runs at the speed of memory.
    std::uint32_t last = 0;
    for (std::uint32_t unit : targets) last = std::max(last, unit);
    if (last >= to->units)
      return "target unit " + std::to_string(last) + " is outside pool " + std::to_string(pool_id) + " of " +
             std::to_string(to->units) + " units";
    const std::uint64_t unit = to->unit_bytes;
    if (part.offset > unit || part.nbytes > unit - part.offset)
      return "bytes " + std::to_string(part.offset) + " to " + std::to_string(part.offset + part.nbytes) +
             " are outside a unit of " + std::to_string(unit);
    if (part.nbytes == 0) part.nbytes = unit - part.offset;
    if (way == Way::kernel && (part.offset % 16 != 0 || part.nbytes % 16 != 0))
      return "the part is not aligned to 16 bytes, which way kernel needs";
    if (by_cpu(way) && !from->is_host()) return "the source is " + from->memory() + " memory, this way needs host";
    if (way == Way::kernel && source % 16 != 0) return "the source is not aligned to 16 bytes, which way kernel needs";
    pool = std::move(to);
    region = std::move(from);
    return {};
  }

  bool empty() const { return next_ == sources.size(); }

  struct Units {
    const std::uint32_t* sources;
    const std::uint32_t* targets;
    std::uint32_t count;
  };
  // The next units, at most so many.
  Units take_units(std::uint32_t most) {
    Units units{&sources[next_], &targets[next_],
                static_cast<std::uint32_t>(std::min<std::size_t>(most, sources.size() - next_))};
    next_ += units.count;
    return units;
  }
  std::uint64_t nbytes() const { return sources.size() * part.nbytes; }

  // The next run of at most `limit` bytes. What is pushed of a single unit, where it is larger than that, is cut when
  // `cut`, else given whole.
  Run take(std::uint64_t limit, bool cut) {
    const std::uint64_t size = part.nbytes, stride = pool->unit_bytes, within = part.offset + done_of_unit_;
    Run run{source + sources[next_] * stride + within, targets[next_] * stride + within, 0, 0};
    if (size > limit) {
      std::uint64_t left = size - done_of_unit_;
      run.nbytes = cut ? std::min(left, limit) : left;
      done_of_unit_ += run.nbytes;
      if (done_of_unit_ == size) finish_units(run, 1);
      return run;
    }
    // Parts of neighbours are none.
    const std::uint64_t most = size < stride ? 1 : std::min<std::uint64_t>(limit / size, sources.size() - next_);
    std::uint32_t n = 1;
    while (n < most && sources[next_ + n] == sources[next_] + n && targets[next_ + n] == targets[next_] + n) ++n;
    run.nbytes = n * size;
    finish_units(run, n);
    return run;
  }

  // The next run of a batch that several threads take from; nothing when it is empty or ended. `first`: a rail has not
  // taken any before.
  std::optional<Run> deal(std::uint64_t limit, bool first) {
    std::lock_guard lock(cursor_);
    if (ended_ || empty()) return std::nullopt;
    takers_ += first;
    return take(limit, true);
  }
  // Nothing more is dealt out. Returns how many rails took something: a thread that has not woken up by now is not
  // waited for.
  unsigned end_deal() {
    std::lock_guard lock(cursor_);
    ended_ = true;
    return takers_;
  }

  const std::uint32_t pool_id;
  const std::uint64_t source;
  const std::vector<std::uint32_t> sources;
  const std::vector<std::uint32_t> targets;
  Part part;  // from bind() on with its bytes
  Way way;
  std::shared_ptr<CudaFence> after;  // until it is known to be done
  const bool ends_push;              // the last piece of what was pushed at once
  const std::uint32_t only_rail;     // which alone is to carry it; 0: no matter
  bool dealt = false;                // out to the rails as well; from then on only deal() moves the cursor
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Region> region;

 private:
  void finish_units(Run& run, std::uint32_t n) {
    run.units = n;
    next_ += n;
    done_of_unit_ = 0;
  }

  std::mutex cursor_;
  bool ended_ = false;
  unsigned takers_ = 0;
  std::size_t next_ = 0;
  std::uint64_t done_of_unit_ = 0;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// One push: which units go where, and a cursor that hands them out as runs contiguous on both sides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mapping.h"
#include "memory.h"
#include "rkey.h"

namespace kvrail {

// A peer's pool: reached by put when it has a key, by copying when it has a mapping.
struct Pool {
  std::uint64_t units;
  std::uint64_t unit_bytes;
  std::uint64_t base = 0;
  std::unique_ptr<RemoteKey> key;
  std::unique_ptr<Mapping> mapping;
};

struct Run {
  std::uint64_t source;  // address
  std::uint64_t target;  // offset in the peer's pool
  std::uint64_t nbytes;
  std::uint32_t units;  // that are complete with this run (0 for a piece of a unit that is not its last)
};

class Batch {
 public:
  Batch(std::uint32_t pool, std::uint64_t source, std::vector<std::uint32_t> sources,
        std::vector<std::uint32_t> targets)
      : pool_id(pool), source(source), sources(std::move(sources)), targets(std::move(targets)) {}

  // Binds the batch to the peer's pool and to our registered memory. Returns why it cannot, or "": nothing
  // else in the system checks bounds, over tcp and cma a key protects nothing.
  std::string bind(std::shared_ptr<Pool> to, std::shared_ptr<Region> from) {
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (targets[i] >= to->units)
        return "target unit " + std::to_string(targets[i]) + " is outside pool " + std::to_string(pool_id) + " of " +
               std::to_string(to->units) + " units";
    }
    pool = std::move(to);
    region = std::move(from);
    return {};
  }

  bool empty() const { return next_ == sources.size(); }
  std::uint64_t nbytes() const { return sources.size() * pool->unit_bytes; }

  // The next run of at most `limit` bytes. A single unit larger than that is cut when `cut`, else given
  // whole.
  Run take(std::uint64_t limit, bool cut) {
    const std::uint64_t size = pool->unit_bytes;
    Run run{source + sources[next_] * size + done_of_unit_, targets[next_] * size + done_of_unit_, 0, 0};
    if (size > limit) {
      std::uint64_t left = size - done_of_unit_;
      run.nbytes = cut ? std::min(left, limit) : left;
      done_of_unit_ += run.nbytes;
      if (done_of_unit_ == size) finish_units(run, 1);
      return run;
    }
    const std::uint64_t most = std::min<std::uint64_t>(limit / size, sources.size() - next_);
    std::uint32_t n = 1;
    while (n < most && sources[next_ + n] == sources[next_] + n && targets[next_ + n] == targets[next_] + n) ++n;
    run.nbytes = n * size;
    finish_units(run, n);
    return run;
  }

  const std::uint32_t pool_id;
  const std::uint64_t source;
  const std::vector<std::uint32_t> sources;
  const std::vector<std::uint32_t> targets;
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Region> region;

 private:
  void finish_units(Run& run, std::uint32_t n) {
    run.units = n;
    next_ += n;
    done_of_unit_ = 0;
  }

  std::size_t next_ = 0;
  std::uint64_t done_of_unit_ = 0;
};

}  // namespace kvrail

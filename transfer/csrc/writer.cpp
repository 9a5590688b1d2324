// SPDX-License-Identifier: Apache-2.0
#include "writer.h"

#include <algorithm>
#include <utility>

#include "context.h"
#include "link.h"

namespace kvrail {
namespace {

// In turn with the other writers of the link.
constexpr int kPutsPerTurn = 16;
// A run larger than this delays a stop for too long.
constexpr std::uint64_t kPutBytes = 8 << 20;
// Below this much the reactor's thread copies at once: two thread switches would cost more.
constexpr std::uint64_t kInlineBytes = 256 << 10;
// From this much on a batch is dealt out to the rails: waking their threads pays.
constexpr std::uint64_t kDealFrom = 1 << 20;

}  // namespace

Writer::Writer(Link& link, std::uint64_t key, Nanos ttl) : link_(link), key_(key), deadline_(now_ns() + ttl) {}

bool Writer::may_write() const { return !forbidden_ && link_.usable() && now_ns() < deadline_; }

void Writer::count_copied(std::uint64_t units, std::uint64_t nbytes) {
  posted_ += units;
  done_ += units;
  link_.stats().copies += 1;
  link_.stats().copied_bytes += nbytes;
}

void Writer::add(std::shared_ptr<Batch> batch) {
  if (stopping_ || refused_ != UCS_OK) return;
  auto pool = link_.pool(batch->pool_id);
  if (!pool) return fail(UCS_ERR_NO_ELEM, "pool " + std::to_string(batch->pool_id) + " was not imported");
  // With more pieces to come there is no progress to tell.
  progress_due_ = batch->ends_push;
  if (batch->empty()) return;
  std::uint32_t low = batch->sources[0], high = low;
  for (std::uint32_t unit : batch->sources) {
    low = std::min(low, unit);
    high = std::max(high, unit);
  }
  const std::uint64_t first = batch->source + low * pool->unit_bytes;
  const std::uint64_t span = (std::uint64_t{high} - low + 1) * pool->unit_bytes;
  auto region = link_.context().find_region(first, span);
  if (!region) return fail(UCS_ERR_INVALID_ADDR, "source units are outside every registered region");
  batch->way = pool->choose(batch->way);
  if (batch->way == Way::best)
    return fail(UCS_ERR_NO_ELEM, "pool " + std::to_string(batch->pool_id) + " was not imported for that way");
  if (std::string why = batch->bind(std::move(pool), std::move(region)); !why.empty())
    return fail(UCS_ERR_INVALID_ADDR, why);
  if (std::string why = pinned_for(*batch, first, span); !why.empty()) return fail(UCS_ERR_INVALID_ADDR, why);
  batches_.push_back(std::move(batch));
}

void Writer::ring(std::string message) {
  if (!stopping_ && refused_ == UCS_OK) ring_ = std::move(message);
}

void Writer::stop() {
  forbidden_ = true;
  stopping_ = true;
  drop_batches();
  // A doorbell that UCX already has goes out; one that waits does not.
  if (!sending_) ring_.reset();
}

void Writer::abandon() {
  if (stopping_ || ring_) return;
  silent_ = true;
  stop();
}

bool Writer::advance() {
  if (refused_ == UCS_OK && !batches_.empty()) post_some();
  if (!idle()) return !batches_.empty();
  if (stopping_) {
    finish_stop();
  } else if (!forbidden_ && batches_.empty()) {
    if (ring_) {
      finish_ring();
    } else if (std::exchange(progress_due_, false)) {
      link_.tell(EventKind::progress, key_, UCS_OK, {});
    }
  }
  return !batches_.empty();
}

void Writer::post_some() {
  waits_ = false;
  for (int i = 0; i < kPutsPerTurn && !batches_.empty(); ++i) {
    auto batch = batches_.front();
    if (!may_write()) return refuse_rest();
    if (!may_start(*batch)) return;
    if (batch->way == Way::kernel || batch->way == Way::engine) {
      waits_ = i == 0 && !link_.gpu()->open();
      if (!link_.gpu()->open()) return link_.hold();
      if (post_slice(batch)) batches_.pop_front();
      return;
    }
    if (batch->way == Way::shm) {
      if (post_copy(batch)) batches_.pop_front();
      link_.go_on();
      return;
    }
    if (batch->way == Way::stream) {
      if (!link_.stream(shared_from_this(), batch))
        return fail(UCS_ERR_NO_ELEM, "the link has no connection for lane stream");
      ++shares_out_;
      batches_.pop_front();
      continue;
    }
    if (batch->only_rail > 0) {
      if (!carry_alone(batch)) return;
      continue;
    }
    if (!batch->dealt && batch->nbytes() >= kDealFrom) batch->dealt = link_.deal_out(shared_from_this(), batch);
    if (!link_.window_open(batch->dealt)) {
      waits_ = i == 0;
      return;
    }
    const std::optional<Run> run = batch->dealt ? batch->deal(kDealtRun, false) : batch->take(kPutBytes, false);
    // (Of a batch that is dealt out the cursor is not ours to look at, and the rails may have taken the rest.)
    if (!run || (!batch->dealt && batch->empty())) pop_batch();
    if (!run) continue;
    count_posted(run->units);
    ++puts_out_;
    unflushed_ = true;
    link_.put(*this, *batch, *run);
    if (refused_ != UCS_OK) return;
  }
}

bool Writer::carry_alone(const std::shared_ptr<Batch>& batch) {
  if (!link_.carry(shared_from_this(), batch, batch->only_rail)) {
    fail(UCS_ERR_NO_ELEM, "the link has no rail " + std::to_string(batch->only_rail));
    return false;
  }
  ++shares_out_;
  batches_.pop_front();
  return true;
}

void Writer::pop_batch() {
  if (batches_.front()->dealt) shares_out_ += static_cast<std::int32_t>(batches_.front()->end_deal());
  batches_.pop_front();
}

void Writer::drop_batches() {
  while (!batches_.empty()) pop_batch();
}

std::string Writer::pinned_for(const Batch& batch, std::uint64_t address, std::uint64_t nbytes) const {
  if (by_cpu(batch.way) || batch.way == Way::put || !batch.region->is_host()) return {};
  if (link_.gpu()->device().pinned(address, nbytes)) return {};
  return "the source is host memory that is not pinned, which the GPU cannot read";
}

bool Writer::may_start(Batch& batch) {
  if (!batch.after) return true;
  // Asked here instead of making the copy stream wait: a batch that waits for the GPU's computing can then still be
  // stopped, meets its deadline (I3), and does not hold up another writer's copies.
  try {
    if (!batch.after->event.done()) {
      link_.hold();
      return false;
    }
  } catch (const CudaError& error) {
    fail(UCS_ERR_IO_ERROR, std::string("what was to be pushed could not be computed: ") + error.what());
    return false;
  }
  batch.after.reset();
  return true;
}

bool Writer::post_slice(const std::shared_ptr<Batch>& batch) {
  try {
    const GpuSlice& slice = link_.gpu_copy(shared_from_this(), batch);
    posted_ += slice.units;
    ++copies_out_;
  } catch (const CudaError& error) {
    if (unproven_ == UCS_OK) unproven_ = UCS_ERR_IO_ERROR;
    fail(UCS_ERR_IO_ERROR, std::string("a copy on the GPU could not be started: ") + error.what());
    return false;
  }
  return batch->empty();
}

void Writer::slice_done(const GpuSlice& slice) {
  --copies_out_;
  if (slice.error.empty()) {
    done_ += slice.units;
    return;
  }
  failed_ += slice.units;
  if (unproven_ == UCS_OK) unproven_ = UCS_ERR_IO_ERROR;
  fail(UCS_ERR_IO_ERROR, "a copy on the GPU failed: " + slice.error);
}

bool Writer::post_copy(const std::shared_ptr<Batch>& batch) {
  if (link_.crew() != nullptr && batch->nbytes() > kInlineBytes) {
    ++copies_out_;
    link_.copy(std::make_shared<CopyJob>(CopyJob{shared_from_this(), batch}));
    return true;
  }
  take_slice(*batch, kSliceBytes, runs_);
  copy_slice(*this, *batch, runs_);
  return batch->empty();
}

void Writer::put_done(std::uint32_t units, ucs_status_t status) {
  --puts_out_;
  count_done(units, status == UCS_OK);
  if (status != UCS_OK) put_failed(status);
}

void Writer::put_failed(ucs_status_t status, const std::string& reason) {
  if (unproven_ == UCS_OK) unproven_ = status;
  fail(status, "a put failed: " + (reason.empty() ? ucs_status_string(status) : reason));
}

void Writer::share_done(bool refused, ucs_status_t status, const std::string& reason) {
  --shares_out_;
  if (status != UCS_OK) return put_failed(status, reason);
  if (refused) refuse_rest();
}

void Writer::copy_done(const CopyJob& job) {
  --copies_out_;
  if (job.refused) refuse_rest();
}

void Writer::refuse_rest() {
  drop_batches();
  // After forbid() the stop() itself, or the failure, is about to be told.
  if (forbidden_) return;
  if (!link_.usable()) return link_lost(UCS_ERR_CONNECTION_RESET, "the link is gone");
  fail(UCS_ERR_TIMED_OUT, "the time to live is over");
}

void Writer::fail(ucs_status_t status, const std::string& reason) {
  forbidden_ = true;
  drop_batches();
  if (!sending_) ring_.reset();
  if (refused_ == UCS_OK) refused_ = status;
  // After a stop only QUIET speaks, after RUNG nothing is left that could fail.
  if (stopping_ || rung_ || std::exchange(failed_said_, true)) return;
  link_.tell(EventKind::failed, key_, status, reason);
}

void Writer::link_lost(ucs_status_t status, const std::string& reason) {
  if (rung_ && !stopping_) return;
  if (unproven_ == UCS_OK) unproven_ = status;
  fail(status, reason);
}

void Writer::start_flush() {
  flushing_ = true;
  unflushed_ = false;
  link_.flush_for(shared_from_this());
}

void Writer::flush_done(ucs_status_t status) {
  flushing_ = false;
  if (status == UCS_OK) return;
  if (unproven_ == UCS_OK) unproven_ = status;
  fail(status, std::string("the flush failed: ") + ucs_status_string(status));
}

void Writer::finish_ring() {
  // Puts → all of them OK → flush OK → message: a message without the flush overtakes the data. Copies were
  // ordered by the fence of the thread that copied.
  if (unflushed_) return start_flush();
  sending_ = true;
  link_.send_for(shared_from_this(), std::move(*ring_));
}

void Writer::send_done(ucs_status_t status) {
  sending_ = false;
  ring_.reset();
  if (status == UCS_OK) {
    rung_ = true;
    // FAILED was said when the link was lost in between: it stays the only word.
    if (!failed_said_) link_.tell(EventKind::rung, key_, UCS_OK, std::to_string(now_ns()));
  } else {
    if (unproven_ == UCS_OK) unproven_ = status;
    fail(status, std::string("the doorbell could not be sent: ") + ucs_status_string(status));
  }
}

void Writer::finish_stop() {
  if (quiet_said_) return;
  if (unproven_ == UCS_OK && !link_.usable()) unproven_ = UCS_ERR_CONNECTION_RESET;
  if (unproven_ == UCS_OK && unflushed_) return start_flush();
  say_quiet(unproven_);
}

void Writer::say_quiet(ucs_status_t status) {
  quiet_said_ = true;
  if (!silent_) link_.tell(EventKind::quiet, key_, status, {});
}

bool Writer::over() const { return idle() && (rung_ || quiet_said_ || failed_said_); }

}  // namespace kvrail

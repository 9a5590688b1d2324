// SPDX-License-Identifier: Apache-2.0
// All writes of one ticket: posts them, counts them, and ends in exactly one way.
//
// How a writer ends (the events are documented in _ucx.pyi):
//   ring()  → when every unit is OK: flush, message → RUNG
//   any put that fails or is refused, a lost link → FAILED, unless stop() came first
//   stop()  → nothing more is posted; when nothing is under way any more: flush → QUIET, always, once
#pragma once

#include <ucs/type/status.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batch.h"
#include "clock.h"
#include "copy.h"
#include "cuda_copy.h"

namespace kvrail {

class Link;

class Writer : public std::enable_shared_from_this<Writer> {
 public:
  Writer(Link& link, std::uint64_t key, Nanos ttl);

  // Any thread.
  Link& link() { return link_; }
  std::uint64_t key() const { return key_; }
  std::uint64_t posted() const { return posted_; }
  std::uint64_t done() const { return done_; }
  std::uint64_t failed() const { return failed_; }
  void renew(Nanos ttl) { deadline_ = now_ns() + ttl; }
  // Stops what has not been posted yet, from this moment on.
  void forbid() { forbidden_ = true; }
  // Asked before each put and each slice (I3).
  bool may_write() const;
  void count_copied(std::uint64_t units, std::uint64_t nbytes);
  void count_posted(std::uint32_t units) { posted_ += units; }
  void count_done(std::uint32_t units, bool ok) { (ok ? done_ : failed_) += units; }

  // The reactor's thread.
  void add(std::shared_ptr<Batch> batch);
  void ring(std::string message);
  void stop();
  // Nobody will ask any more: like stop(), without the answer, if no doorbell is on its way.
  void abandon();
  // Posts what may be posted, and takes the next step towards the end. True: has more to post.
  bool advance();
  // The endpoint failed, or the link was fenced or closed.
  void link_lost(ucs_status_t status, const std::string& reason);
  void put_done(std::uint32_t units, ucs_status_t status);
  void copy_done(const CopyJob& job);
  // What a rail, or lane stream, took of a batch has landed, or has failed (for `reason`, if that is known); `refused`:
  // it stopped before the end of the batch.
  void share_done(bool refused, ucs_status_t status, const std::string& reason = {});
  void slice_done(const GpuSlice& slice);
  void flush_done(ucs_status_t status);
  void send_done(ucs_status_t status);
  bool idle() const { return puts_out_ == 0 && copies_out_ == 0 && shares_out_ == 0 && !flushing_ && !sending_; }
  // True when nothing but a stop() can happen to this writer any more.
  bool over() const;
  bool scheduled = false;  // kept by the link
  // It found the window of the link closed, and posted nothing.
  bool waits() const { return waits_; }

 private:
  void post_some();
  bool may_start(Batch& batch);
  bool carry_alone(const std::shared_ptr<Batch>& batch);
  void pop_batch();
  void drop_batches();
  bool post_slice(const std::shared_ptr<Batch>& batch);
  std::string pinned_for(const Batch& batch, std::uint64_t address, std::uint64_t nbytes) const;
  bool post_copy(const std::shared_ptr<Batch>& batch);
  void put_failed(ucs_status_t status, const std::string& reason = {});
  void fail(ucs_status_t status, const std::string& reason);
  void refuse_rest();
  void start_flush();
  void finish_ring();
  void finish_stop();
  void say_quiet(ucs_status_t status);

  Link& link_;
  const std::uint64_t key_;
  std::atomic<Nanos> deadline_;
  std::atomic<bool> forbidden_ = false;
  std::atomic<std::uint64_t> posted_ = 0, done_ = 0, failed_ = 0;

  std::deque<std::shared_ptr<Batch>> batches_;
  std::vector<Run> runs_;
  std::uint32_t puts_out_ = 0, copies_out_ = 0;
  // Of rails and of lane stream. Those of a batch are counted when it has been dealt out: below zero until then, when
  // some are done already.
  std::int32_t shares_out_ = 0;
  bool unflushed_ = false;  // puts were posted since the last flush
  bool flushing_ = false, sending_ = false;
  std::optional<std::string> ring_;
  bool progress_due_ = false;
  bool waits_ = false;
  bool stopping_ = false, silent_ = false;
  bool rung_ = false, failed_said_ = false, quiet_said_ = false;
  // Why nothing more is posted; and, apart from it, whether a write may be lost or still under way. A refusal
  // sets only the first: what was posted before it can still be proven quiet.
  ucs_status_t refused_ = UCS_OK;
  ucs_status_t unproven_ = UCS_OK;
};

}  // namespace kvrail

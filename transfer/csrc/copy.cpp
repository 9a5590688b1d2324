// SPDX-License-Identifier: Apache-2.0
#include "copy.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "stream_copy.h"
#include "thread.h"
#include "writer.h"

namespace kvrail {

void take_slice(Batch& batch, std::uint64_t limit, std::vector<Run>& runs, std::size_t most) {
  runs.clear();
  for (std::uint64_t left = limit; !batch.empty() && runs.size() < most;) {
    // A unit that no longer fits into this slice waits for the next one.
    if (!runs.empty() && left < std::min(batch.part.nbytes, limit)) break;
    runs.push_back(batch.take(left, true));
    left -= std::min(left, runs.back().nbytes);
  }
}

void copy_slice(Writer& writer, const Batch& batch, const std::vector<Run>& runs) {
  std::uint64_t units = 0, nbytes = 0;
  for (const Run& run : runs) {
    stream_copy(batch.pool->mapping->data() + run.target, reinterpret_cast<const void*>(run.source), run.nbytes);
    units += run.units;
    nbytes += run.nbytes;
  }
  // Each thread orders its own stores, before it reports them.
  stream_fence();
  writer.count_copied(units, nbytes);
}

CopyCrew::CopyCrew(unsigned threads, std::function<void(std::shared_ptr<CopyJob>)> finished)
    : finished_(std::move(finished)), slice_(threads > 1 ? kSliceBytes / 4 : kSliceBytes) {
  threads_.reserve(threads);
  try {
    for (unsigned i = 0; i < threads; ++i) {
      threads_.push_back(start_thread("kvrail-copy", [this] { work(); }));
      // Copying must not take the core away from the thread that has just ordered it, in the middle of its
      // call.
      sched_param param{};
      pthread_setschedparam(threads_.back().native_handle(), SCHED_BATCH, &param);
    }
  } catch (...) {
    // The system gives no more threads; those that run would outlive their crew.
    end();
    throw;
  }
}

CopyCrew::~CopyCrew() { end(); }

void CopyCrew::end() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void CopyCrew::submit(std::shared_ptr<CopyJob> job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  // Each thread that takes a slice of a job with more of them wakes the next thread.
  wake_.notify_one();
}

void CopyCrew::work() {
  std::vector<Run> runs;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    std::shared_ptr<CopyJob> job = std::move(jobs_.front());
    jobs_.pop_front();
    if (!job->writer->may_write()) {
      job->refused = true;
    } else {
      take_slice(*job->batch, slice_, runs);
      ++job->running;
      if (!job->batch->empty()) {
        jobs_.push_back(job);
        wake_.notify_one();
      }
      lock.unlock();
      copy_slice(*job->writer, *job->batch, runs);
      lock.lock();
      --job->running;
    }
    bool over = job->running == 0 && (job->refused || job->batch->empty());
    if (!over) continue;
    lock.unlock();
    finished_(std::move(job));
    lock.lock();
  }
}

}  // namespace kvrail

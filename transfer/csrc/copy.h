// SPDX-License-Identifier: Apache-2.0
// The threads that copy for lane shm, a slice at a time, in turn between the jobs that wait.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "batch.h"

namespace kvrail {

class Writer;

// Between two slices the writer is asked again whether it may still write (I3), so this bounds how long a
// copy runs on after a stop, a fence or a deadline.
inline constexpr std::uint64_t kSliceBytes = 1 << 20;

struct CopyJob {
  std::shared_ptr<Writer> writer;
  std::shared_ptr<Batch> batch;
  bool refused = false;  // the writer was told to stop before all slices were copied
  int running = 0;       // slices being copied now
};

// Copies up to `limit` bytes of the batch, fences the stores, counts the units. The caller has asked the
// writer.
void copy_slice(Writer& writer, const Batch& batch, const std::vector<Run>& runs);
// The next runs of the batch: at most `limit` bytes, and at most `most` of them.
void take_slice(Batch& batch, std::uint64_t limit, std::vector<Run>& runs, std::size_t most = SIZE_MAX);

class CopyCrew {
 public:
  // `finished` is called on a copy thread when no slice of the job runs or will run any more.
  CopyCrew(unsigned threads, std::function<void(std::shared_ptr<CopyJob>)> finished);
  // Returns after at most one slice a thread.
  ~CopyCrew();
  void submit(std::shared_ptr<CopyJob> job);

 private:
  void work();
  void end();

  const std::function<void(std::shared_ptr<CopyJob>)> finished_;
  const std::uint64_t slice_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::deque<std::shared_ptr<CopyJob>> jobs_;
  std::vector<std::thread> threads_;
};

}  // namespace kvrail

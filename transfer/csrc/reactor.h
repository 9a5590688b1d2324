// SPDX-License-Identifier: Apache-2.0
// The one progress thread: owns every worker, endpoint, key and request. Others leave commands in a queue; it
// tells them through the event queue.
//
// It spins for `spin` after the last work, then arms every worker and sleeps in epoll. A command wakes it
// only when it sleeps.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "copy.h"
#include "cuda_copy.h"
#include "events.h"
#include "stats.h"

namespace kvrail {

class Context;
class Link;

class Reactor {
 public:
  using Command = std::function<void()>;

  // `copy_threads` 0: the progress thread copies for lane shm itself, a slice at a time.
  // `cuda`: for copies on that GPU, and UCX works in its context.
  Reactor(std::shared_ptr<Context> context, Nanos spin, unsigned copy_threads, std::shared_ptr<CudaDevice> cuda);
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Any thread.
  std::shared_ptr<Link> open_link(std::uint32_t epoch, std::uint64_t cookie);
  // False: closed, the command will not run.
  bool post(Command command);
  // Closes every link and ends the threads, within about a second. Idempotent.
  void close();
  EventQueue& events() { return events_; }
  Stats& stats() { return stats_; }
  Context& context() { return *context_; }
  const std::shared_ptr<CudaDevice>& cuda() const { return cuda_; }
  int epoll_fd() const { return epoll_fd_; }
  void watch_worker(int fd, std::uint32_t link);
  void forget_worker(int fd);
  static std::uint64_t control_tag(std::uint32_t link) { return std::uint64_t{link} << 1 | 1; }

  // The reactor's thread.
  CopyCrew* crew() { return crew_.get(); }
  CudaCopier* gpu() { return gpu_.get(); }

 private:
  void run();
  bool run_commands();
  // Both: whether an event, and not the clock, was the reason to return.
  bool sleep(Nanos now);
  bool look_at_fds(int timeout_ms);
  bool nap(Nanos length);
  int timeout_ms(Nanos now) const;
  Nanos gpu_nap(Nanos now) const;

  const std::shared_ptr<Context> context_;
  const Nanos spin_;
  EventQueue events_;
  Stats stats_;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;

  std::mutex mutex_;
  std::vector<Command> commands_;
  bool closed_ = false;
  std::atomic<bool> pending_ = false;
  std::atomic<bool> sleeping_ = false;
  std::atomic<std::uint32_t> next_link_ = 1;

  std::map<std::uint32_t, std::shared_ptr<Link>> links_;
  bool ending_ = false;
  std::unique_ptr<CopyCrew> crew_;
  const std::shared_ptr<CudaDevice> cuda_;
  std::unique_ptr<CudaCopier> gpu_;
  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// The one progress thread: owns every worker, endpoint, key and request. Others leave commands in a queue; it
// tells them through the event queue.
//
// It spins for `spin` after the last work, then arms every worker and sleeps in epoll. A command wakes it
// only when it sleeps. While it does, another thread may take the turn for a command that is soon done: waking
// takes longer than that, above all on a virtual machine whose idle core has been halted.
#pragma once

#include <sys/epoll.h>

#include <array>
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
#include "fd.h"
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
  // Likewise; but while the progress thread sleeps, this thread itself runs the command and what follows from it on
  // `link`, if `light` says, asked in the turn, that this is soon done.
  bool post_light(Link& link, const std::function<bool()>& light, Command command);
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
  bool enqueue(Command command);
  void wake();
  bool run_commands();
  bool finish_here(Link& link);
  // Both: whether an event, and not the clock, was the reason to return.
  struct Ready {
    std::array<epoll_event, 64> events;
    int count;
  };
  bool sleep(Nanos now, std::unique_lock<std::mutex>& turn);
  Ready wait_for_fds(int timeout_ms) const;
  bool look_at(const Ready& ready);
  bool nap(Nanos length);
  int timeout_ms(Nanos now) const;
  Nanos gpu_nap(Nanos now) const;

  const std::shared_ptr<Context> context_;
  const Nanos spin_;
  EventQueue events_;
  Stats stats_;
  const Fd epoll_fd_;
  const Fd wake_fd_;

  std::mutex mutex_;
  std::vector<Command> commands_;
  bool closed_ = false;
  std::atomic<bool> pending_ = false;
  std::atomic<bool> sleeping_ = false;
  std::atomic<std::uint32_t> next_link_ = 1;

  // Held by whoever takes a turn; by the progress thread always but while it waits in epoll. A link's and a writer's
  // "reactor's thread" is the one that holds it.
  std::mutex turn_;
  std::map<std::uint32_t, std::shared_ptr<Link>> links_;
  bool ending_ = false;
  std::unique_ptr<CopyCrew> crew_;
  const std::shared_ptr<CudaDevice> cuda_;
  std::unique_ptr<CudaCopier> gpu_;
  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
#include "reactor.h"

#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "context.h"
#include "link.h"
#include "status.h"
#include "thread.h"
#include "writer.h"

namespace kvrail {
namespace {

constexpr std::uint64_t kWakeTag = 0;
// Bounds every sleep, so that deadlines are met and a wake-up that a transport missed costs only this long.
constexpr Nanos kLongestSleep = 100 * kMilli;
// While requests are under way: not every transport wakes a sender whose peer has made room again.
constexpr Nanos kBusySleep = kMilli;
constexpr int kProgressPerTurn = 4;
// Between two looks at a GPU that computes what is to be pushed, or at puts from its memory.
constexpr Nanos kGpuNap = 20 * kMicro;
// How often the control sockets are looked at while spinning.
constexpr Nanos kLookEvery = 200 * kMicro;
// A turn that another thread takes ends after this long; the progress thread goes on with it.
constexpr Nanos kLightTurn = 20 * kMicro;

}  // namespace

Reactor::Reactor(std::shared_ptr<Context> context, Nanos spin, unsigned copy_threads, std::shared_ptr<CudaDevice> cuda)
    : context_(std::move(context)),
      spin_(spin),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC), "reactor: epoll_create1"),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "reactor: eventfd"),
      cuda_(std::move(cuda)),
      gpu_(cuda_ ? std::make_unique<CudaCopier>(cuda_, stats_.gpu_ns) : nullptr) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeTag;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, wake_fd_, &event) < 0)
    throw std::system_error(errno, std::generic_category(), "reactor");
  if (copy_threads > 0) {
    crew_ = std::make_unique<CopyCrew>(copy_threads, [this](std::shared_ptr<CopyJob> job) {
      post([job = std::move(job)] { job->writer->link().copy_done(*job); });
    });
  }
  thread_ = start_thread("kvrail-ucx", [this] { run(); });
}

Reactor::~Reactor() { close(); }

std::shared_ptr<Link> Reactor::open_link(std::uint32_t epoch, std::uint64_t cookie) {
  context_->require_open("open_link");
  // UCX looks for the current context when it makes a worker.
  std::optional<CudaScope> scope;
  if (cuda_) scope.emplace(*cuda_);
  auto link = std::make_shared<Link>(*this, next_link_++, epoch, cookie);
  bool posted = post([this, link] {
    links_.emplace(link->id(), link);
    if (ending_) link->begin_close();
  });
  if (!posted) throw UcxError("open_link", UCS_ERR_CANCELED, "the reactor is closed");
  return link;
}

bool Reactor::enqueue(Command command) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    commands_.push_back(std::move(command));
  }
  // Sequentially consistent, against sleep(): either it sees pending_, or we see sleeping_.
  pending_ = true;
  return true;
}

void Reactor::wake() {
  if (sleeping_.exchange(false)) eventfd_write(wake_fd_, 1);
}

bool Reactor::post(Command command) {
  if (!enqueue(std::move(command))) return false;
  wake();
  return true;
}

bool Reactor::post_light(Link& link, const std::function<bool()>& light, Command command) {
  if (!enqueue(std::move(command))) return false;
  // With a GPU, UCX works in a context that is current on the progress thread only.
  if (sleeping_ && !cuda_) {
    // Not ours: it is just falling asleep, or waking up.
    std::unique_lock turn(turn_, std::try_to_lock);
    if (turn && light() && finish_here(link)) return true;
  }
  wake();
  return true;
}

// The workers were armed before the thread fell asleep, and progress made here takes nothing of that back: what comes
// later makes their fds readable. True: nothing is left that would have to wake the thread.
bool Reactor::finish_here(Link& link) {
  ++stats_.light_turns;
  run_commands();
  const Nanos begun = now_ns();
  for (Nanos now = begun; now - begun < kLightTurn; now = now_ns())
    if (link.turn(now, 1) == 0) return !link.needs_turns() && !pending_;
  return false;
}

void Reactor::close() {
  std::lock_guard once(close_mutex_);
  if (!thread_.joinable()) return;
  post([this] {
    ending_ = true;
    for (auto& [id, link] : links_) link->begin_close();
  });
  thread_.join();
  crew_.reset();
}

bool Reactor::run_commands() {
  if (!pending_.exchange(false)) return false;
  std::vector<Command> commands;
  {
    std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (Command& command : commands) command();
  stats_.commands += commands.size();
  return true;
}

void Reactor::run() {
  std::unique_lock turn(turn_);
  if (cuda_) {
    // Before the first call of UCX: without a current context it takes cuda_ipc for unreachable when it unpacks a key,
    // and crashes when a worker is armed. It was current for a moment in the constructor, so this works.
    (void)cuda_->driver().context_set(cuda_->context());
    // For good, as UCX calls the driver on this thread as well (see CudaScope).
    int mode = kCaptureRelaxed;
    (void)cuda_->driver().capture_mode(&mode);
    // The naps between two looks at the GPU are shorter than the slack that timers have by default.
    prctl(PR_SET_TIMERSLACK, 1000UL);
  }
  Nanos active = now_ns(), looked = active;
  while (true) {
    bool work = run_commands();
    if (gpu_ && gpu_->poll([](GpuSlice slice) { slice.writer->link().slice_done(slice); }) > 0) work = true;
    Nanos now = now_ns();
    for (auto each = links_.begin(); each != links_.end();) {
      if (each->second->turn(now, kProgressPerTurn) > 0) work = true;
      each = each->second->closed() ? links_.erase(each) : std::next(each);
    }
    ++stats_.turns;
    if (ending_ && links_.empty()) {
      // A link that was opened meanwhile may still be in the queue.
      std::lock_guard lock(mutex_);
      if (commands_.empty()) {
        closed_ = true;
        return;
      }
    }
    now = now_ns();
    if (now - looked >= kLookEvery) {
      looked = now;
      look_at(wait_for_fds(0));
    }
    if (work) {
      active = now;
    } else if (now - active < spin_) {
      // To a thread that waits for this core, perhaps with what is spun for.
      sched_yield();
    } else {
      bool woken = sleep(now, turn);
      looked = now_ns();
      if (woken) active = looked;
    }
  }
}

// While work of the GPU is under way nothing sleeps for long, and no worker is armed.
Nanos Reactor::gpu_nap(Nanos now) const {
  Nanos most = gpu_ ? gpu_->nap(now) : std::numeric_limits<Nanos>::max();
  if (!cuda_) return most;
  for (const auto& [id, link] : links_)
    if (link->holds() || link->puts_out()) most = std::min(most, kGpuNap);
  return most;
}

bool Reactor::nap(Nanos length) {
  if (length == 0) {
    sched_yield();
    return false;
  }
  sleeping_ = true;
  bool woken = false;
  if (!pending_) {
    pollfd fd{epoll_fd_, POLLIN, 0};
    timespec time{0, length};
    woken = ppoll(&fd, 1, &time, nullptr) > 0 && look_at(wait_for_fds(0));
  }
  sleeping_ = false;
  return woken;
}

bool Reactor::sleep(Nanos now, std::unique_lock<std::mutex>& turn) {
  if (Nanos length = gpu_nap(now); length <= kGpuNap) return nap(length);
  bool woken = false;
  sleeping_ = true;
  bool armed = !pending_;
  for (auto& [id, link] : links_) armed = armed && link->arm();
  if (armed) {
    ++stats_.sleeps;
    const int timeout = timeout_ms(now);
    turn.unlock();
    Ready ready = wait_for_fds(timeout);
    turn.lock();
    woken = look_at(ready);
  }
  sleeping_ = false;
  return woken;
}

Reactor::Ready Reactor::wait_for_fds(int timeout_ms) const {
  Ready ready;
  ready.count = epoll_wait(epoll_fd_, ready.events.data(), static_cast<int>(ready.events.size()), timeout_ms);
  return ready;
}

bool Reactor::look_at(const Ready& ready) {
  for (int i = 0; i < ready.count; ++i) {
    std::uint64_t tag = ready.events[static_cast<std::size_t>(i)].data.u64;
    if (tag == kWakeTag) {
      eventfd_t ignored;
      (void)eventfd_read(wake_fd_, &ignored);
    } else if (tag & 1) {
      if (auto link = links_.find(static_cast<std::uint32_t>(tag >> 1)); link != links_.end())
        link->second->on_control_ready();
    }
    // A worker's fd only ends the sleep: the next turn progresses it.
  }
  return ready.count > 0;
}

int Reactor::timeout_ms(Nanos now) const {
  Nanos until = now + kLongestSleep;
  for (const auto& [id, link] : links_) {
    until = std::min(until, link->next_deadline());
    if (link->busy()) until = std::min(until, now + kBusySleep);
  }
  return static_cast<int>(std::max<Nanos>(0, (until - now + kMilli - 1) / kMilli));
}

void Reactor::watch_worker(int fd, std::uint32_t link) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = std::uint64_t{link} << 1;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) < 0)
    throw std::system_error(errno, std::generic_category(), "watching a worker");
}

void Reactor::forget_worker(int fd) { epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); }

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
#include "rail.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "context.h"
#include "link.h"
#include "reactor.h"
#include "status.h"
#include "thread.h"
#include "writer.h"

namespace kvrail {
namespace {

constexpr int kProgressPerTurn = 4;
constexpr int kPutsPerTurn = 16;
// While requests are under way: not every transport wakes a sender whose peer has made room again.
constexpr int kBusySleepMs = 1;
// Otherwise nothing here has a deadline; the link's own endpoint watches the peer.
constexpr int kIdleSleepMs = 1000;
// Nobody sends a rail messages.
constexpr unsigned kNoMessages = 0;

}  // namespace

Rail::Rail(Link& link, unsigned number, std::string peer_address, std::vector<std::string> transports)
    : link_(link), number_(number), peer_address_(std::move(peer_address)), transports_(std::move(transports)) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "rail");
  thread_ = start_thread("kvrail-rail", [this] { run(); });
}

Rail::~Rail() {
  // Its last words were rail_over(): it is about to return.
  thread_.join();
  close(wake_fd_);
}

void Rail::order(Order order) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back(std::move(order));
  }
  // Sequentially consistent, against sleep(): either it sees pending_, or we see sleeping_.
  pending_ = true;
  if (sleeping_.exchange(false)) eventfd_write(wake_fd_, 1);
}

void Rail::carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch) {
  order([this, writer = std::move(writer), batch = std::move(batch)]() mutable {
    Share& share = shares_.emplace_back();
    share.writer = std::move(writer);
    share.batch = std::move(batch);
    share.awaited = share.batch->only_rail > 0;
  });
}

void Rail::end(bool force) {
  order([this, force] { farewell_.begin(force || error_ != UCS_OK, now_ns()); });
}

void Rail::run() {
  open();
  while (true) {
    bool work = take_orders();
    for (int i = 0; worker_ && i < kProgressPerTurn && worker_->progress() > 0; ++i) work = true;
    // Before any share looks at a flush that came back OK in the same breath.
    if (error_ != UCS_OK && !error_told_) fail(error_, std::string("failed: ") + ucs_status_string(error_));
    if (advance()) work = true;
    if (farewell_.begun() && farewell_.step(now_ns(), endpoint_.get(), !window_.empty() && link_.puts_by_cpu(), busy()))
      break;
    if (!work) sleep();
  }
  destroy();
  // The command holds the link from here on: this thread must not be the one that drops it last.
  link_.reactor().post([link = link_.shared_from_this(), number = number_] { link->rail_over(number); });
}

void Rail::open() {
  try {
    worker_ = std::make_unique<Worker>(link_.context().handle(), kNoMessages, on_message, this);
    endpoint_ = std::make_unique<Endpoint>(worker_->handle(), peer_address_, on_error, this);
    if (endpoint_->transports() != transports_)
      throw UcxError("rail", UCS_ERR_UNSUPPORTED, "got other transports than the link");
  } catch (const UcxError& error) {
    fail(error.status, error.what());
  }
}

void Rail::fail(ucs_status_t status, std::string reason) {
  error_ = status;
  error_told_ = true;
  link_.reactor().post([link = link_.shared_from_this(), status, reason = std::move(reason), number = number_] {
    link->rail_failed(number, status, reason);
  });
}

bool Rail::take_orders() {
  if (!pending_.exchange(false)) return false;
  std::vector<Order> orders;
  {
    std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  for (Order& order : orders) order();
  return true;
}

bool Rail::advance() {
  bool work = false;
  for (auto share = shares_.begin(); share != shares_.end();) {
    if (post_some(*share)) work = true;
    if (settled(*share)) {
      report(*share);
      share = shares_.erase(share);
      work = true;
    } else {
      ++share;
    }
  }
  // Whoever came first now comes last: the first takes all the room that there is.
  if (shares_.size() > 1) shares_.splice(shares_.end(), shares_, shares_.begin());
  return work;
}

bool Rail::post_some(Share& share) {
  bool posted = false;
  for (int i = 0; i < kPutsPerTurn && !share.over; ++i) {
    if (error_ != UCS_OK || share.status != UCS_OK || !share.writer->may_write()) {
      share.over = share.refused = true;
      break;
    }
    if (!window_.open()) break;
    const std::optional<Run> run = share.batch->deal(kDealtRun, !share.awaited);
    if (!run) {
      share.over = true;
      break;
    }
    share.awaited = true;
    const Batch& batch = *share.batch;
    share.writer->count_posted(run->units);
    ++share.puts_out;
    share.unflushed = posted = true;
    Window::Put* put = window_.take(this, &share, run->units, run->nbytes);
    Stats& stats = link_.stats();
    ++stats.puts;
    ++stats.rail_puts;
    stats.put_bytes += run->nbytes;
    try {
      endpoint_->put<on_put_done>(reinterpret_cast<const void*>(run->source), run->nbytes,
                                  batch.pool->base + run->target, key_of(share), batch.region->handle(),
                                  batch.region->kind(), put);
    } catch (const UcxError& error) {  // of the key
      on_put_done(put, error.status);
    }
  }
  return posted;
}

const RemoteKey& Rail::key_of(Share& share) {
  if (share.key == nullptr) {
    auto& key = keys_[share.batch->pool->packed_key];
    if (!key) key = std::make_unique<RemoteKey>(endpoint_->handle(), share.batch->pool->packed_key);
    share.key = key.get();
  }
  return *share.key;
}

bool Rail::settled(Share& share) {
  if (!share.over || share.puts_out > 0 || share.flushing) return false;
  if (error_ != UCS_OK && share.status == UCS_OK) share.status = error_;
  if (share.status == UCS_OK && share.unflushed) {
    share.unflushed = false;
    if (farewell_.begun()) {
      share.status = UCS_ERR_CANCELED;
    } else {
      share.flushing = true;
      endpoint_->flush<on_flush_done>(&share);
    }
  }
  return !share.flushing;
}

void Rail::report(Share& share) {
  // The batch goes along: it may be the last to hold its pool, whose key only the reactor's thread may destroy.
  link_.reactor().post([writer = std::move(share.writer), batch = std::move(share.batch), number = number_,
                        awaited = share.awaited, refused = share.refused, status = share.status] {
    if (awaited) writer->link().share_done(writer, number, refused, status);
  });
}

void Rail::on_put_done(void* user, ucs_status_t status) {
  auto* put = static_cast<Window::Put*>(user);
  Share& share = *put->what;
  --share.puts_out;
  share.writer->count_done(put->units, status == UCS_OK);
  if (status != UCS_OK && share.status == UCS_OK) share.status = status;
  put->owner->window_.give_back(put);
}

void Rail::on_flush_done(void* user, ucs_status_t status) {
  Share& share = *static_cast<Share*>(user);
  share.flushing = false;
  if (status != UCS_OK && share.status == UCS_OK) share.status = status;
}

void Rail::on_error(void* user, ucp_ep_h, ucs_status_t status) {
  // Inside progress(): only noted here, run() acts.
  auto& rail = *static_cast<Rail*>(user);
  if (rail.error_ == UCS_OK) rail.error_ = status;
}

ucs_status_t Rail::on_message(void* user, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
  ++static_cast<Rail*>(user)->link_.stats().messages_wrong_link;
  return UCS_OK;
}

bool Rail::busy() const {
  if (!window_.empty()) return true;
  for (const Share& share : shares_)
    if (share.flushing) return true;
  return false;
}

void Rail::destroy() {
  keys_.clear();
  endpoint_.reset();
  worker_.reset();
  window_.for_each([](Window::Put* put) { on_put_done(put, UCS_ERR_CANCELED); });
  // Orders that came after the end: the link is not usable any more, so they are refused.
  take_orders();
  for (Share& share : shares_) {
    on_flush_done(&share, UCS_ERR_CANCELED);
    report(share);
  }
  shares_.clear();
}

void Rail::sleep() {
  sleeping_ = true;
  if (!pending_ && (!worker_ || worker_->arm())) {
    std::array<pollfd, 2> fds{{{wake_fd_, POLLIN, 0}, {worker_ ? worker_->event_fd() : -1, POLLIN, 0}}};
    poll(fds.data(), fds.size(), busy() || farewell_.begun() ? kBusySleepMs : kIdleSleepMs);
    eventfd_t ignored;
    if (fds[0].revents != 0) (void)eventfd_read(wake_fd_, &ignored);
  }
  sleeping_ = false;
}

}  // namespace kvrail

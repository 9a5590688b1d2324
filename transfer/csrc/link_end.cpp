// SPDX-License-Identifier: Apache-2.0
// How a link ends: by an error of its endpoint, by a fence, by close(); and its control stream.
#include <utility>

#include "context.h"
#include "link.h"
#include "reactor.h"
#include "writer.h"

namespace kvrail {

void Link::on_error(void* arg, ucp_ep_h, ucs_status_t status) {
  // Inside progress(): only noted here, turn() acts.
  auto& link = *static_cast<Link*>(arg);
  if (link.error_ == UCS_OK) link.error_ = status;
}

void Link::break_off(ucs_status_t status, const std::string& reason) {
  error_ = status;
  usable_ = false;
  if (std::exchange(error_told_, true) || phase_ != Phase::open) return;
  tell(EventKind::link_error, 0, status, reason);
  lose_writers(status, reason);
}

void Link::lose_writers(ucs_status_t status, const std::string& reason) {
  for (const auto& writer : writers_) {
    writer->link_lost(status, reason);
    schedule(writer);
  }
}

void Link::fence() {
  usable_ = false;
  command([](Link& link) {
    if (link.phase_ == Phase::fenced) return link.tell(EventKind::fenced, 0, UCS_OK, {});
    if (link.phase_ == Phase::closed) return;
    link.fencing_ = true;
    link.begin_end("the link was fenced", true);
  });
}

void Link::close() {
  if (!close_asked_.exchange(true)) context().link_closing();
  command([](Link& link) { link.begin_close(); });
}

void Link::begin_close() {
  if (!close_asked_.exchange(true)) context().link_closing();
  if (std::exchange(closing_, true)) return;
  begin_end("the link was closed", false);
}

void Link::begin_end(const char* reason, bool force) {
  usable_ = false;
  if (phase_ != Phase::open) return;
  phase_ = Phase::ending;
  lose_writers(UCS_ERR_CANCELED, reason);
  force = force || error_ != UCS_OK;
  farewell_.begin(force, now_ns());
  for (const OpenRail& each : rails_) each.rail->end(force);
  // In peace the peer is to hear our last messages before it sees this end.
  if (force || reader_) end_stream();
}

void Link::rail_failed(unsigned number, ucs_status_t status, const std::string& reason) {
  // One that has never worked has put nothing but tests: the link goes on without it. What another has not flushed
  // can be proven by the end of the link only.
  if (rails_[number - 1].proven) break_off(status, "rail " + std::to_string(number) + ": " + reason);
}

void Link::rail_over(unsigned number) {
  rails_[number - 1].rail.reset();
  --rails_running_;
}

void Link::step_end(Nanos now) {
  // Copies read and write memory that is about to be unmapped; each ends with its slice.
  if (copies_out_ > 0) return;
  if (worker_) {
    if (!farewell_.step(now, endpoint_.get(), !window_.empty() && puts_by_cpu_, busy_requests())) return;
    end_stream();
    // They hold shares of writers whose last word is due below; and a reader writes until its thread is joined.
    if (rails_running_ > 0 || reader_ || streamer_) return;
    destroy_worker();
    // What they had under way is accounted for now: let each say its last word before the link does.
    run_writers();
  }
  phase_ = Phase::fenced;
  if (std::exchange(fencing_, false)) tell(EventKind::fenced, 0, UCS_OK, {});
  if (!closing_) return;
  if (beats_) std::exchange(beats_, nullptr)->end();
  phase_ = Phase::closed;
  context().link_closed(true);
}

void Link::destroy_worker() {
  // Keys belong to the endpoint, the endpoint to the worker.
  pools_.clear();
  replaced_.clear();
  endpoint_.reset();
  if (worker_) reactor_.forget_worker(worker_->event_fd());
  worker_.reset();
  window_.for_each([](auto* put) { on_put_done(put, UCS_ERR_CANCELED); });
  while (!operations_.empty()) on_operation_done(&operations_.front(), UCS_ERR_CANCELED);
}

void Link::attach_control(int fd, Nanos interval) {
  auto control = std::make_shared<Control>(fd, reactor_.epoll_fd(), Reactor::control_tag(id_), interval);
  {
    std::lock_guard lock(control_mutex_);
    control_ = control;
  }
  command([control = std::move(control)](Link& link) {
    if (link.closing_) return control->end();
    link.beats_ = control;
  });
}

void Link::set_beat(std::string payload) {
  std::lock_guard lock(control_mutex_);
  if (control_) control_->set_beat(std::move(payload));
}

Control::PeerBeat Link::peer_beat() const {
  std::lock_guard lock(control_mutex_);
  return control_ ? control_->peer_beat() : Control::PeerBeat{};
}

void Link::on_control_ready() {
  if (beats_ && !beats_->on_ready()) drop_control();
}

void Link::drop_control() {
  beats_->end();
  tell(EventKind::control, 0, beats_->error(), beats_->reason());
  beats_.reset();
}

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
#include "control.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace kvrail {
namespace {

constexpr std::size_t kPrefix = sizeof(std::uint32_t);

}  // namespace

Control::Control(int fd, int epoll_fd, std::uint64_t tag, Nanos interval)
    : fd_(fd), epoll_fd_(epoll_fd), tag_(tag), interval_(interval), next_beat_(now_ns()), peer_beat_at_(next_beat_) {
  int flags = fcntl(fd_, F_GETFL);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag_;
  // The fd is ours only if this succeeds.
  if (flags < 0 || fcntl(fd_, F_SETFL, flags | O_NONBLOCK) < 0 || epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd_, &event) < 0)
    throw std::system_error(errno, std::generic_category(), "attach_control");
}

Control::~Control() { end(); }

void Control::end() {
  if (fd_ < 0) return;
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd_, nullptr);
  std::lock_guard lock(mutex_);
  close(std::exchange(fd_, -1));
}

void Control::set_beat(std::string payload) {
  std::lock_guard lock(mutex_);
  beat_ = std::move(payload);
}

Control::PeerBeat Control::peer_beat() const {
  std::lock_guard lock(mutex_);
  int waiting = 0;
  bool unread = fd_ >= 0 && ioctl(fd_, FIONREAD, &waiting) == 0 && waiting > 0;
  return {now_ns() - peer_beat_at_, peer_beat_, unread};
}

bool Control::on_ready() { return read_all() && send_some(); }

bool Control::on_time(Nanos now) {
  if (now < next_beat_) return true;
  next_beat_ = now + interval_;
  if (outgoing_.empty()) {
    std::lock_guard lock(mutex_);
    auto length = static_cast<std::uint32_t>(beat_.size());
    outgoing_.resize(kPrefix + length);
    std::memcpy(outgoing_.data(), &length, kPrefix);
    std::memcpy(outgoing_.data() + kPrefix, beat_.data(), length);
  }
  return send_some();
}

bool Control::send_some() {
  while (sent_ < outgoing_.size()) {
    ssize_t n = send(fd_, outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      want_output(true);
      return true;
    }
    if (n < 0) return broken("sending a heartbeat failed", errno);
    sent_ += static_cast<std::size_t>(n);
  }
  outgoing_.clear();
  sent_ = 0;
  want_output(false);
  return true;
}

bool Control::read_all() {
  std::array<char, 16384> buffer;
  std::lock_guard lock(mutex_);
  while (true) {
    ssize_t n = recv(fd_, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    if (n < 0) return broken("the control stream broke", errno);
    if (n == 0) return broken("the peer closed the control stream", 0);
    incoming_.append(buffer.data(), static_cast<std::size_t>(n));
    if (!take_frames()) return false;
  }
}

bool Control::take_frames() {
  std::size_t at = 0;
  while (incoming_.size() - at >= kPrefix) {
    std::uint32_t length;
    std::memcpy(&length, incoming_.data() + at, kPrefix);
    if (length > kMaxBeat) return broken("the peer sent a heartbeat frame that is too long", EMSGSIZE);
    if (incoming_.size() - at - kPrefix < length) break;
    peer_beat_.assign(incoming_, at + kPrefix, length);
    peer_beat_at_ = now_ns();
    at += kPrefix + length;
  }
  incoming_.erase(0, at);
  return true;
}

bool Control::broken(const char* what, int error) {
  error_ = error;
  reason_ = what;
  if (error != 0) reason_ += ": " + std::generic_category().message(error);
  return false;
}

void Control::want_output(bool wanted) {
  if (wanted == output_wanted_) return;
  output_wanted_ = wanted;
  epoll_event event{};
  event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.u64 = tag_;
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd_, &event);
}

}  // namespace kvrail

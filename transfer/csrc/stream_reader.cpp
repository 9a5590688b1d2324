// SPDX-License-Identifier: Apache-2.0
#include "stream_reader.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "link.h"
#include "reactor.h"
#include "thread.h"

namespace kvrail {
namespace {

// Who says nothing for so long is sent away; sooner, when he is the oldest of so many and was heard for a moment: a
// crowd must neither keep the writer out nor push him out before his secret is here.
constexpr Nanos kPatience = 5 * kSecond;
constexpr Nanos kMoment = 200 * kMilli;
constexpr std::size_t kMostStrangers = 128;
constexpr Nanos kNap = 50 * kMilli;

}  // namespace

StreamReader::StreamReader(Link& link, Fd listener, const StreamSecret& secret, Targets targets)
    : link_(link),
      listener_(std::move(listener)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "stream: eventfd"),
      secret_(secret),
      targets_(std::move(targets)) {
  runs_.reserve(kStreamMostRuns);
  thread_ = start_thread("kvrail-stream", [this] { run(); });
}

StreamReader::~StreamReader() { thread_.join(); }

void StreamReader::end() {
  ending_ = true;
  eventfd_write(wake_fd_, 1);
  std::lock_guard lock(mutex_);
  // What it waits for in the kernel ends now.
  if (connection_) shutdown(*connection_, SHUT_RDWR);
}

void StreamReader::run() {
  if (let_in())
    while (read_frame()) {
    }
  {
    // The peer learns of it: who is not read would wait.
    std::lock_guard lock(mutex_);
    connection_.reset();
  }
  strangers_.clear();
  listener_.reset();
  link_.reactor().post([link = link_.shared_from_this()] { link->stream_over(); });
}

bool StreamReader::let_in() {
  while (!ending_) {
    const bool room = has_room();
    std::vector<pollfd> fds{{wake_fd_, POLLIN, 0}, {room ? int{*listener_} : -1, POLLIN, 0}};
    for (const Stranger& each : strangers_) fds.push_back({each.fd, POLLIN, 0});
    Nanos left = 0;
    if (!strangers_.empty()) left = strangers_.front().came + (room ? kPatience : kMoment) - now_ns();
    // (Rounded up: it is over when we look.)
    poll(fds.data(), fds.size(), strangers_.empty() ? -1 : static_cast<int>(std::max<Nanos>(0, left) / kMilli) + 1);
    auto ready = fds.begin() + 2;
    for (auto each = strangers_.begin(); each != strangers_.end(); ++ready) {
      const Said said = ready->revents != 0 ? hear(*each) : Said::kNotAll;
      if (said == Said::kSecret) return !ending_;
      const bool over = each->came + kPatience <= now_ns();
      each = said == Said::kWrong || over ? strangers_.erase(each) : std::next(each);
    }
    if (fds[1].revents != 0 && accept_some()) return !ending_;
  }
  return false;
}

// The oldest stranger makes room for the next, once he had his moment.
bool StreamReader::has_room() const {
  return strangers_.size() < kMostStrangers || strangers_.front().came + kMoment <= now_ns();
}

// Returns whether the writer is among them.
bool StreamReader::accept_some() {
  // At most: others have said something meanwhile.
  for (std::size_t i = 0; i < kMostStrangers && has_room(); ++i) {
    const int fd = accept4(*listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN) {
        // No descriptors left, say, and he still waits: not at once again.
        pollfd woken{wake_fd_, POLLIN, 0};
        poll(&woken, 1, static_cast<int>(kNap / kMilli));
      }
      return false;
    }
    Stranger& last = strangers_.emplace_back(fd);
    last.came = now_ns();
    Said said = hear(last);
    if (said == Said::kWrong) strangers_.pop_back();
    if (said == Said::kNotAll && strangers_.size() > kMostStrangers) {
      // Perhaps he has spoken just now.
      said = hear(strangers_.front());
      if (said != Said::kSecret) strangers_.pop_front();
    }
    if (said == Said::kSecret) return true;
  }
  return false;
}

// Who says the secret is let in, and nobody else is expected.
StreamReader::Said StreamReader::hear(Stranger& stranger) {
  const ssize_t got =
      recv(stranger.fd, stranger.secret.data() + stranger.said, stranger.secret.size() - stranger.said, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Said::kNotAll;
  if (got <= 0) return Said::kWrong;
  stranger.said += static_cast<std::size_t>(got);
  if (stranger.said < secret_.size()) return Said::kNotAll;
  if (!same_secret(stranger.secret, secret_)) {
    ++link_.stats().stream_strangers;
    return Said::kWrong;
  }
  std::lock_guard lock(mutex_);
  connection_.emplace(std::move(stranger.fd));
  strangers_.clear();
  listener_.reset();
  return Said::kSecret;
}

bool StreamReader::read_frame() {
  StreamFrame frame;
  if (!receive(&frame, sizeof frame)) return false;
  std::string fault = fault_of(frame);
  if (fault.empty()) {
    const Target& target = targets_.at(frame.pool);
    runs_.resize(frame.runs);
    if (!receive(runs_.data(), runs_.size() * sizeof(StreamRun))) return false;
    fault = fault_of(frame, target);
    if (fault.empty()) {
      if (!receive_runs(target)) return false;
      last_frame_.store(frame.number, std::memory_order_release);
      ++link_.stats().stream_frames_received;
      link_.stats().stream_bytes_received += frame.nbytes;
      if (send(*connection_, &frame.number, sizeof frame.number, MSG_NOSIGNAL) == sizeof frame.number) return true;
      return lost("send");
    }
  }
  fail("the peer sent a frame that is not allowed: " + fault, true);
  return false;
}

std::string StreamReader::fault_of(const StreamFrame& frame) const {
  if (frame.magic != StreamFrame::kMagic || frame.zero != 0) return "it is none";
  if (frame.number != last_frame_ + 1) return "its number is not the next one";
  const auto found = targets_.find(frame.pool);
  if (found == targets_.end()) return "there is no pool " + std::to_string(frame.pool);
  if (frame.unit_bytes != found->second.unit_bytes) return "its units have another size";
  if (frame.runs == 0 || frame.runs > kStreamMostRuns) return "it has " + std::to_string(frame.runs) + " runs";
  return {};
}

// All of it before the first byte is written: nobody else checks where a peer writes.
std::string StreamReader::fault_of(const StreamFrame& frame, const Target& target) const {
  std::uint64_t left = frame.nbytes;
  for (const StreamRun& run : runs_) {
    if (run.offset >= target.nbytes || run.nbytes > target.nbytes - run.offset)
      return "a run lies outside pool " + std::to_string(frame.pool);
    const std::uint64_t within = run.offset % target.unit_bytes;
    const bool whole = within == 0 && run.nbytes % target.unit_bytes == 0;
    if (run.nbytes == 0 || (!whole && run.nbytes > target.unit_bytes - within))
      return "a run is neither whole units nor a piece of one";
    if (run.nbytes > left) return "its runs are longer than it";
    left -= run.nbytes;
  }
  return left > 0 ? "its runs are shorter than it" : std::string();
}

bool StreamReader::receive(void* into, std::size_t nbytes) {
  auto* at = static_cast<char*>(into);
  while (nbytes > 0) {
    const ssize_t got = ending_ ? 0 : recv(*connection_, at, nbytes, MSG_WAITALL);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      return lost(got < 0 ? "recv" : nullptr);
    }
    at += got;
    nbytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool StreamReader::receive_runs(const Target& target) {
  std::array<iovec, kStreamMostRuns> vectors;
  for (std::size_t i = 0; i < runs_.size(); ++i)
    vectors[i] = {reinterpret_cast<void*>(target.base + runs_[i].offset), runs_[i].nbytes};
  iovec* first = vectors.data();
  iovec* const end = first + runs_.size();
  while (first != end) {
    msghdr message{};
    message.msg_iov = first;
    message.msg_iovlen = static_cast<std::size_t>(end - first);
    ssize_t got = ending_ ? 0 : recvmsg(*connection_, &message, MSG_WAITALL);
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      return lost(got < 0 ? "recvmsg" : nullptr);
    }
    for (auto left = static_cast<std::size_t>(got); left > 0;) {
      const std::size_t taken = std::min(left, first->iov_len);
      first->iov_base = static_cast<char*>(first->iov_base) + taken;
      first->iov_len -= taken;
      left -= taken;
      if (first->iov_len == 0) ++first;
    }
  }
  return true;
}

// `call`: what failed, with errno; null: the peer has closed the connection, or we do.
bool StreamReader::lost(const char* call) {
  const int error = errno;
  if (!ending_)
    fail(call == nullptr ? "the peer closed it" : std::string(call) + ": " + std::generic_category().message(error),
         false);
  return false;
}

void StreamReader::fail(std::string reason, bool forbidden) {
  link_.reactor().post([link = link_.shared_from_this(), reason = std::move(reason), forbidden] {
    link->stream_failed(reason, forbidden);
  });
}

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
#include "stream_writer.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "copy.h"
#include "link.h"
#include "reactor.h"
#include "thread.h"
#include "writer.h"

namespace kvrail {
namespace {

constexpr Nanos kConnectWithin = 5 * kSecond;
// How long a batch that was stopped, or whose time is over, may wait behind a frame that does not get on.
constexpr Nanos kLookEvery = 50 * kMilli;
constexpr Nanos kForever = std::numeric_limits<Nanos>::max();
// Frames that wait for an answer: more would only make a stop wait.
constexpr std::size_t kMostSent = 64;

}  // namespace

StreamWriter::StreamWriter(Link& link, Fd connection, const StreamSecret& secret)
    : link_(link),
      connection_(std::move(connection)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "stream: eventfd"),
      secret_(secret) {
  thread_ = start_thread("kvrail-stream", [this] { run(); });
}

StreamWriter::~StreamWriter() { thread_.join(); }

void StreamWriter::carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch) {
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({std::move(writer), std::move(batch)});
    if (orders_.size() > 1) return;  // It has been woken.
  }
  eventfd_write(wake_fd_, 1);
}

void StreamWriter::end() {
  ending_ = true;
  eventfd_write(wake_fd_, 1);
}

void StreamWriter::run() {
  broken_ = !connect();
  while (!ending_) {
    bool work = take_orders();
    if (broken_) {
      give_back();
      wait(0, kForever);
      continue;
    }
    if (next_vector_ == vectors_.size() && sent_.size() < kMostSent) begin_frame();
    if (send_some()) work = true;
    if (hear()) work = true;
    settle();
    if (work || broken_) continue;
    // Before it falls asleep, perhaps for as long as the peer is frozen; and at times while it is not answered.
    refuse_late();
    const bool sending = next_vector_ < vectors_.size();
    wait(sending ? POLLIN | POLLOUT : POLLIN, shares_.empty() ? kForever : now_ns() + kLookEvery);
  }
  shutdown(connection_, SHUT_RDWR);
  take_orders();
  give_back();
  link_.reactor().post([link = link_.shared_from_this()] { link->stream_over(); });
}

bool StreamWriter::connect() {
  const Nanos until = now_ns() + kConnectWithin;
  sockaddr_storage peer;
  socklen_t size = sizeof peer;
  while (getpeername(connection_, reinterpret_cast<sockaddr*>(&peer), &size) < 0) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(connection_, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0 && !wait(POLLOUT, until)) error = ETIMEDOUT;
    if (error != 0) fail("connect", error);
    if (error != 0 || ending_) return false;
    size = sizeof peer;
  }
  // Its first bytes: there is room.
  if (send(connection_, secret_.data(), secret_.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(secret_.size()))
    return true;
  fail("send", errno);
  return false;
}

bool StreamWriter::take_orders() {
  std::vector<Share> orders;
  {
    std::lock_guard lock(mutex_);
    orders.swap(orders_);
  }
  for (Share& order : orders) shares_.push_back(std::move(order));
  return !orders.empty();
}

void StreamWriter::begin_frame() {
  for (auto share = shares_.begin(); share != shares_.end(); ++share) {
    if (share->over) continue;
    if (!share->writer->may_write()) {
      share->over = share->refused = true;
      continue;
    }
    Batch& batch = *share->batch;
    take_slice(batch, kSliceBytes, runs_, kStreamMostRuns);
    share->over = batch.empty();
    StreamFrame frame{StreamFrame::kMagic,
                      batch.pool_id,
                      ++last_frame_,
                      batch.pool->unit_bytes,
                      0,
                      static_cast<std::uint32_t>(runs_.size()),
                      0};
    head_.resize(sizeof frame + runs_.size() * sizeof(StreamRun));
    vectors_.assign(1, {head_.data(), head_.size()});
    next_vector_ = 0;
    std::uint32_t units = 0;
    char* listed = head_.data() + sizeof frame;
    for (const Run& run : runs_) {
      const StreamRun said{run.target, run.nbytes};
      std::memcpy(listed, &said, sizeof said);
      listed += sizeof said;
      vectors_.push_back({reinterpret_cast<void*>(run.source), run.nbytes});
      frame.nbytes += run.nbytes;
      units += run.units;
    }
    std::memcpy(head_.data(), &frame, sizeof frame);
    share->writer->count_posted(units);
    ++share->frames_out;
    sent_.push_back({&*share, units});
    Stats& stats = link_.stats();
    ++stats.stream_frames;
    stats.stream_bytes += frame.nbytes;
    // Whoever came first now comes last.
    shares_.splice(shares_.end(), shares_, share);
    return;
  }
}

void StreamWriter::refuse_late() {
  for (Share& share : shares_)
    if (!share.over && !share.writer->may_write()) share.over = share.refused = true;
  settle();
}

bool StreamWriter::send_some() {
  if (next_vector_ == vectors_.size()) return false;
  msghdr message{};
  message.msg_iov = &vectors_[next_vector_];
  message.msg_iovlen = vectors_.size() - next_vector_;
  const ssize_t sent = sendmsg(connection_, &message, MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno != EAGAIN && errno != EINTR) fail("sendmsg", errno);
    return errno == EINTR;
  }
  for (auto left = static_cast<std::size_t>(sent); left > 0;) {
    iovec& vector = vectors_[next_vector_];
    const std::size_t taken = std::min(left, vector.iov_len);
    vector.iov_base = static_cast<char*>(vector.iov_base) + taken;
    vector.iov_len -= taken;
    left -= taken;
    if (vector.iov_len == 0) ++next_vector_;
  }
  return true;
}

bool StreamWriter::hear() {
  std::array<char, 8 * kMostSent> heard;
  const ssize_t got = broken_ ? -1 : recv(connection_, heard.data(), heard.size(), 0);
  if (got <= 0) {
    if (got == 0) fail("recv", ECONNRESET);
    if (got < 0 && !broken_ && errno != EAGAIN && errno != EINTR) fail("recv", errno);
    return false;
  }
  answer_.append(heard.data(), static_cast<std::size_t>(got));
  std::size_t read = 0;
  for (; answer_.size() - read >= sizeof(std::uint64_t); read += sizeof(std::uint64_t)) {
    std::uint64_t number;
    std::memcpy(&number, answer_.data() + read, sizeof number);
    const bool complete = sent_.size() > 1 || next_vector_ == vectors_.size();
    if (number != answered_ + 1 || sent_.empty() || !complete) {
      fail("the peer has answered a frame that it has not got", EPROTO);
      return false;
    }
    answered_ = number;
    Sent done = sent_.front();
    sent_.pop_front();
    done.share->writer->count_done(done.units, true);
    --done.share->frames_out;
  }
  answer_.erase(0, read);
  return true;
}

void StreamWriter::settle() {
  for (auto share = shares_.begin(); share != shares_.end();) {
    if (!share->over || share->frames_out > 0) {
      ++share;
      continue;
    }
    report(*share, UCS_OK);
    share = shares_.erase(share);
  }
}

void StreamWriter::report(Share& share, ucs_status_t status) {
  link_.stream_done(std::move(share.writer), std::move(share.batch), share.refused, status, reason_);
}

// Nothing more goes out. What was begun and not answered is lost, or is not: nobody can know.
void StreamWriter::give_back() {
  if (reason_.empty()) reason_ = "the link was ended";
  for (const Sent& each : sent_) each.share->writer->count_done(each.units, false);
  sent_.clear();
  vectors_.clear();
  next_vector_ = 0;
  for (Share& share : shares_) report(share, UCS_ERR_CONNECTION_RESET);
  shares_.clear();
}

// Until the socket is ready for that, something was ordered, or the time is over: then it returns false.
bool StreamWriter::wait(short events, Nanos until) {
  std::array<pollfd, 2> fds{{{wake_fd_, POLLIN, 0}, {events != 0 ? int{connection_} : -1, events, 0}}};
  const Nanos left = until == kForever ? 0 : std::max<Nanos>(0, until - now_ns());
  poll(fds.data(), fds.size(), until == kForever ? -1 : static_cast<int>(left / kMilli));
  eventfd_t ignored;
  if (fds[0].revents != 0) (void)eventfd_read(wake_fd_, &ignored);
  return fds[0].revents != 0 || fds[1].revents != 0 || now_ns() < until;
}

void StreamWriter::fail(const char* call, int error) {
  if (std::exchange(broken_, true)) return;
  reason_ = std::string(call) + ": " + std::generic_category().message(error);
  link_.reactor().post([link = link_.shared_from_this(), reason = reason_] { link->stream_failed(reason, false); });
}

}  // namespace kvrail

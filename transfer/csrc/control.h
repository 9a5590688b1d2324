// SPDX-License-Identifier: Apache-2.0
// Heartbeats on a link's control stream: a length-prefixed frame every interval, sent and read without
// blocking.
//
// A frame is a little-endian uint32 length and that many bytes (none before the first set_beat). Only the
// latest beat matters: a peer that does not read makes us skip beats, not queue them.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "clock.h"

namespace kvrail {

class Control {
 public:
  static constexpr std::size_t kMaxBeat = 1 << 20;

  // Takes ownership of `fd`, and puts it into the epoll set under `tag`.
  Control(int fd, int epoll_fd, std::uint64_t tag, Nanos interval);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  struct PeerBeat {
    // Nanoseconds since the last beat was read (since the start, before the first); -1 without a stream.
    Nanos age = -1;
    std::string payload;
    // Something has come that the reactor's thread has not read yet: it is that thread that is late, not the peer.
    bool unread = false;
  };

  // Any thread.
  void set_beat(std::string payload);
  PeerBeat peer_beat() const;

  // The reactor's thread. Both return false once the stream is over; reason() then says why.
  bool on_ready();
  bool on_time(Nanos now);
  // Closes the stream; nothing is sent or read any more. Idempotent.
  void end();
  Nanos next_beat() const { return next_beat_; }
  const std::string& reason() const { return reason_; }
  int error() const { return error_; }

 private:
  bool send_some();
  bool read_all();
  bool take_frames();
  bool broken(const char* what, int error);
  void want_output(bool wanted);

  int fd_;  // changed under mutex_
  const int epoll_fd_;
  const std::uint64_t tag_;
  const Nanos interval_;
  Nanos next_beat_;
  std::string outgoing_;
  std::size_t sent_ = 0;
  bool output_wanted_ = false;
  std::string incoming_;
  std::string reason_;
  int error_ = 0;

  // Held from a read to the note of what came: peer_beat sees both or neither.
  mutable std::mutex mutex_;
  std::string beat_;
  Nanos peer_beat_at_;
  std::string peer_beat_;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// The reading end of lane stream: a thread that lets the link's one writer in, checks each of its frames, and receives
// the bytes straight into the pages.
//
// Nothing but this thread writes what comes over the connection. When it has been joined, nothing of the writer can
// land any more, whatever the writer's process and the network still do.
//
// Threads: the reactor's thread makes it, ends it, and destroys it when it is over. The rest is its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "clock.h"
#include "fd.h"
#include "stream_wire.h"

namespace kvrail {

class Link;

class StreamReader {
 public:
  struct Target {
    std::uint64_t base;  // address
    std::uint64_t nbytes;
    std::uint64_t unit_bytes;
  };
  using Targets = std::map<std::uint32_t, Target>;

  // `listener`: a listening socket, which is closed as soon as the writer is in. Link::stream_over() is the last word.
  StreamReader(Link& link, Fd listener, const StreamSecret& secret, Targets targets);
  ~StreamReader();
  StreamReader(const StreamReader&) = delete;
  StreamReader& operator=(const StreamReader&) = delete;

  void end();
  // For a thread of this process that has heard, by way of the peer, that a frame has come: it sees the bytes as well.
  void see_frames() const { (void)last_frame_.load(std::memory_order_acquire); }

 private:
  // Somebody who has not said the secret yet.
  struct Stranger {
    explicit Stranger(int fd) : fd(fd, "accept") {}
    Fd fd;
    Nanos came = 0;
    std::size_t said = 0;
    StreamSecret secret;
  };
  // kWrong: or nothing will follow.
  enum class Said { kNotAll, kWrong, kSecret };

  void run();
  bool let_in();
  bool has_room() const;
  bool accept_some();
  Said hear(Stranger& stranger);
  bool read_frame();
  std::string fault_of(const StreamFrame& frame) const;
  std::string fault_of(const StreamFrame& frame, const Target& target) const;
  bool receive(void* into, std::size_t nbytes);
  bool receive_runs(const Target& target);
  bool lost(const char* call);
  void fail(std::string reason, bool forbidden);

  Link& link_;
  std::optional<Fd> listener_;
  const Fd wake_fd_;
  const StreamSecret secret_;
  const Targets targets_;
  std::list<Stranger> strangers_;  // the oldest first

  std::mutex mutex_;
  std::optional<Fd> connection_;  // set under the mutex
  std::atomic<bool> ending_ = false;

  std::atomic<std::uint64_t> last_frame_ = 0;
  std::vector<StreamRun> runs_;
  std::thread thread_;
};

}  // namespace kvrail

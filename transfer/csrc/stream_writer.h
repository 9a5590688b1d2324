// SPDX-License-Identifier: Apache-2.0
// The writing end of lane stream: a thread that sends the batches of the link's writers, a frame at a time, in turn.
//
// A frame is what a copy thread takes for a slice: before each the writer is asked again whether it may still write
// (I3). What has begun is sent to its end. A batch is done when the reader has said of each of its frames that all of
// it is in place.
//
// Threads: the reactor's thread makes it, orders, ends it, and destroys it when it is over. The rest is its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "batch.h"
#include "clock.h"
#include "fd.h"
#include "stream_wire.h"

struct iovec;

namespace kvrail {

class Link;
class Writer;

class StreamWriter {
 public:
  // `connection`: to the reader, perhaps still connecting, not blocking. Link::stream_over() is the last word.
  StreamWriter(Link& link, Fd connection, const StreamSecret& secret);
  ~StreamWriter();
  StreamWriter(const StreamWriter&) = delete;
  StreamWriter& operator=(const StreamWriter&) = delete;

  // Link::stream_done() follows.
  void carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch);
  void end();

 private:
  // A batch that is not done. It stays in its place in memory.
  struct Share {
    std::shared_ptr<Writer> writer;
    std::shared_ptr<Batch> batch;
    std::uint32_t frames_out = 0;
    bool over = false;     // no frame follows
    bool refused = false;  // though the batch is not empty
  };
  struct Sent {
    Share* share;
    std::uint32_t units;
  };

  void run();
  bool connect();
  bool take_orders();
  void begin_frame();
  void refuse_late();
  bool send_some();
  bool hear();
  void settle();
  void report(Share& share, ucs_status_t status);
  bool wait(short events, Nanos until);
  void fail(const char* call, int error);
  void give_back();

  Link& link_;
  const Fd connection_;
  const Fd wake_fd_;
  const StreamSecret secret_;

  std::mutex mutex_;
  std::vector<Share> orders_;
  std::atomic<bool> ending_ = false;

  bool broken_ = false;
  std::string reason_;
  std::list<Share> shares_;
  std::uint64_t last_frame_ = 0;
  std::deque<Sent> sent_;  // not answered yet; the last one may be on its way
  std::uint64_t answered_ = 0;
  std::string answer_;  // a part of one
  // The frame that is on its way: header and list, and what is left to send.
  std::vector<char> head_;
  std::vector<Run> runs_;
  std::vector<iovec> vectors_;
  std::size_t next_vector_ = 0;

  std::thread thread_;
};

}  // namespace kvrail

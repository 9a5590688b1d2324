// SPDX-License-Identifier: Apache-2.0
// What the reactor tells Python: a queue that any thread may drain, and an eventfd that is readable while it
// may hold something.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "fd.h"

namespace kvrail {

enum class EventKind : int {
  message = 1,
  control,
  link_error,
  fenced,
  flushed,
  progress,
  rung,
  quiet,
  failed,
};

struct Event {
  EventKind kind;
  std::uint32_t link;
  std::uint64_t key;
  int status;
  std::string payload;
};

class EventQueue {
 public:
  EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  void push(Event event);
  std::vector<Event> drain();
  int fd() const { return fd_; }

 private:
  const Fd fd_;
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace kvrail

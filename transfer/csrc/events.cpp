// SPDX-License-Identifier: Apache-2.0
#include "events.h"

#include <sys/eventfd.h>

#include <utility>

namespace kvrail {

EventQueue::EventQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "event queue: eventfd") {}

void EventQueue::push(Event event) {
  bool first;
  {
    std::lock_guard lock(mutex_);
    first = events_.empty();
    events_.push_back(std::move(event));
  }
  // One write wakes the reader for everything that follows until it drains.
  if (first) eventfd_write(fd_, 1);
}

std::vector<Event> EventQueue::drain() {
  // Clear the fd before taking the events: one that comes in between is then taken now and only wakes once
  // more.
  eventfd_t count;
  (void)eventfd_read(fd_, &count);
  std::vector<Event> taken;
  std::lock_guard lock(mutex_);
  taken.swap(events_);
  return taken;
}

}  // namespace kvrail

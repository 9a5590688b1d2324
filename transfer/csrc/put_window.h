// SPDX-License-Identifier: Apache-2.0
// The puts of a link that are under way: at most so many, and at most so many bytes, so that a stop is
// answered soon and no writer waits behind all of another's pages.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace kvrail {

class Link;
class Writer;

class PutWindow {
 public:
  struct Put {
    Link* link = nullptr;
    Writer* writer = nullptr;  // null: free. A writer outlives its puts: the link keeps it until it is idle.
    std::uint32_t units = 0;
    std::uint64_t nbytes = 0;
  };

  PutWindow() {
    for (Put& put : puts_) free_.push_back(&put);
  }
  PutWindow(const PutWindow&) = delete;
  PutWindow& operator=(const PutWindow&) = delete;

  bool open() const { return !free_.empty() && nbytes_ < kMostBytes; }
  bool empty() const { return free_.size() == puts_.size(); }
  Put* take(Link* link, Writer* writer, std::uint32_t units, std::uint64_t nbytes) {
    Put* put = free_.back();
    free_.pop_back();
    *put = {link, writer, units, nbytes};
    nbytes_ += nbytes;
    return put;
  }
  void give_back(Put* put) {
    nbytes_ -= put->nbytes;
    put->writer = nullptr;
    free_.push_back(put);
  }
  template <typename Act>
  void for_each(Act act) {
    for (Put& put : puts_)
      if (put.writer != nullptr) act(&put);
  }

 private:
  static constexpr std::uint64_t kMostBytes = 64 << 20;
  std::array<Put, 256> puts_;
  std::vector<Put*> free_;
  std::uint64_t nbytes_ = 0;
};

}  // namespace kvrail

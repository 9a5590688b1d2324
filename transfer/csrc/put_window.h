// SPDX-License-Identifier: Apache-2.0
// The puts of one endpoint that are under way: at most so many, and at most so many bytes, so that a stop is answered
// soon and no writer waits behind all of another's pages. For the thread that owns the endpoint.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace kvrail {

// `Owner` holds the window; what a put belongs to (`For`) outlives it.
template <typename Owner, typename For>
class PutWindow {
 public:
  struct Put {
    Owner* owner = nullptr;
    For* what = nullptr;  // null: free
    std::uint32_t units = 0;
    std::uint64_t nbytes = 0;
  };

  explicit PutWindow(std::uint64_t most_bytes) : most_bytes_(most_bytes) {
    for (Put& put : puts_) free_.push_back(&put);
  }
  PutWindow(const PutWindow&) = delete;
  PutWindow& operator=(const PutWindow&) = delete;

  bool open() const { return open(most_bytes_); }
  // Whether less than `most_bytes` are under way, and a put is free.
  bool open(std::uint64_t most_bytes) const { return !free_.empty() && nbytes_ < most_bytes; }
  bool empty() const { return free_.size() == puts_.size(); }
  Put* take(Owner* owner, For* what, std::uint32_t units, std::uint64_t nbytes) {
    Put* put = free_.back();
    free_.pop_back();
    *put = {owner, what, units, nbytes};
    nbytes_ += nbytes;
    return put;
  }
  void give_back(Put* put) {
    nbytes_ -= put->nbytes;
    put->what = nullptr;
    free_.push_back(put);
  }
  template <typename Act>
  void for_each(Act act) {
    for (Put& put : puts_)
      if (put.what != nullptr) act(&put);
  }

 private:
  const std::uint64_t most_bytes_;
  std::array<Put, 256> puts_;
  std::vector<Put*> free_;
  std::uint64_t nbytes_ = 0;
};

}  // namespace kvrail

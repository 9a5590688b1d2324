// SPDX-License-Identifier: Apache-2.0
// Puts numbered messages back into the order in which they were sent.
//
// UCX may take another lane for a large active message than for a small one, so they overtake each other.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace kvrail {

class Ordered {
 public:
  enum class Verdict { delivered, held, duplicate, flood };

  // Calls deliver(message) for this message and for those that waited for it.
  template <typename Deliver>
  Verdict accept(std::uint64_t number, std::string message, Deliver deliver) {
    if (number < next_ || held_.contains(number)) return Verdict::duplicate;
    if (number != next_) {
      if (held_.size() == kMostHeld) return Verdict::flood;
      held_.emplace(number, std::move(message));
      return Verdict::held;
    }
    deliver(std::move(message));
    ++next_;
    for (auto first = held_.begin(); first != held_.end() && first->first == next_; first = held_.begin()) {
      deliver(std::move(first->second));
      held_.erase(first);
      ++next_;
    }
    return Verdict::delivered;
  }

 private:
  // Far more than can be under way; a gap that long means that a message is lost.
  static constexpr std::size_t kMostHeld = 65536;
  std::uint64_t next_ = 0;
  std::map<std::uint64_t, std::string> held_;
};

}  // namespace kvrail

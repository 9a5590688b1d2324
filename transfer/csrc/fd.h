// SPDX-License-Identifier: Apache-2.0
// A file descriptor that is closed with its owner, also when the owner's constructor fails half-way.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace kvrail {

class Fd {
 public:
  // `fd`: what `call` has just returned; throws when that is an error.
  Fd(int fd, const char* call) : fd_(fd) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), call);
  }
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  operator int() const { return fd_; }

 private:
  int fd_;
};

}  // namespace kvrail

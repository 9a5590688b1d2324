// SPDX-License-Identifier: Apache-2.0
// A file descriptor that is closed with its owner, also when the owner's constructor fails half-way.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace kvrail {

class Fd {
 public:
  // `fd`: what `call` has just returned; throws when that is an error.
  Fd(int fd, const char* call) : fd_(fd) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), call);
  }
  ~Fd() { close(fd_); }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  operator int() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// A peer's pool, mapped from its memfd into this process (lane shm).
#pragma once

#include <cstdint>

namespace kvrail {

class Mapping {
 public:
  // Throws when the file is shorter than that, or could still shrink: touching a page that went away kills
  // the process with SIGBUS. The descriptor stays the caller's.
  Mapping(int fd, std::uint64_t offset, std::uint64_t nbytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

}  // namespace kvrail

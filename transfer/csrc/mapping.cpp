// SPDX-License-Identifier: Apache-2.0
#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvrail {
namespace {

constexpr std::uint64_t kHuge = 2 << 20;
constexpr std::uint64_t kPrefault = std::uint64_t{1} << 30;

// Address and offset must agree modulo 2 MiB, or the file's huge pages are mapped as small ones; the kernel sees to
// that only when it makes huge pages of shared memory by itself.
char* map_aligned(int fd, std::uint64_t offset, std::uint64_t size, std::uint64_t huge) {
  std::uint64_t reserved = size + huge;
  void* room = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "import_shm: mmap");
  auto first = reinterpret_cast<std::uint64_t>(room);
  std::uint64_t start = first + (offset - first) % huge;
  void* data = mmap(reinterpret_cast<void*>(start), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
                    static_cast<off_t>(offset));
  if (data == MAP_FAILED) {
    int error = errno;
    munmap(room, reserved);
    throw std::system_error(error, std::generic_category(), "import_shm: mmap");
  }
  if (start > first) munmap(room, start - first);
  if (start + size < first + reserved) munmap(static_cast<char*>(data) + size, first + reserved - start - size);
  return static_cast<char*>(data);
}

}  // namespace

Mapping::Mapping(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  struct stat status;
  if (fstat(fd, &status) < 0) throw std::system_error(errno, std::generic_category(), "import_shm: fstat");
  auto size = static_cast<std::uint64_t>(status.st_size);
  if (nbytes == 0 || offset > size || nbytes > size - offset)
    throw std::invalid_argument("import_shm: the shared file is smaller than the pool that was announced");
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::invalid_argument("import_shm: the shared file is not sealed against shrinking");
  // Huge-page files are mapped, and unmapped, in whole huge pages.
  auto block = static_cast<std::uint64_t>(status.st_blksize);
  nbytes_ = (nbytes + block - 1) / block * block;
  data_ = map_aligned(fd, offset, nbytes_, std::max(kHuge, block));
  // A wish: without huge pages the lane is slower, not wrong.
  (void)madvise(data_, nbytes_, MADV_HUGEPAGE);
  // The pages are there already; faulting them in now keeps that out of the first pushes. Bounded, because the
  // caller waits: with 4 KiB pages it takes about a tenth of a second a GiB.
  (void)madvise(data_, std::min(nbytes, kPrefault), MADV_POPULATE_WRITE);
}

Mapping::~Mapping() { munmap(data_, nbytes_); }

}  // namespace kvrail

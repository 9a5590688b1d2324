// SPDX-License-Identifier: Apache-2.0
#include "mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

namespace kvrail {

Mapping::Mapping(int fd, std::uint64_t offset, std::uint64_t nbytes) {
  struct stat status;
  if (fstat(fd, &status) < 0) throw std::system_error(errno, std::generic_category(), "import_shm: fstat");
  auto size = static_cast<std::uint64_t>(status.st_size);
  if (nbytes == 0 || offset > size || nbytes > size - offset)
    throw std::invalid_argument("import_shm: the shared file is smaller than the pool that was announced");
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw std::invalid_argument("import_shm: the shared file is not sealed against shrinking");
  // Huge-page files are mapped and unmapped in whole huge pages.
  auto block = static_cast<std::uint64_t>(status.st_blksize);
  nbytes_ = (nbytes + block - 1) / block * block;
  void* data = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "import_shm: mmap");
  data_ = static_cast<char*>(data);
  // A wish: without huge pages the lane is slower, not wrong.
  (void)madvise(data, nbytes_, MADV_HUGEPAGE);
}

Mapping::~Mapping() { munmap(data_, nbytes_); }

}  // namespace kvrail

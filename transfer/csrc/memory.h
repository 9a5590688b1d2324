// SPDX-License-Identifier: Apache-2.0
// Memory that UCX has registered: the source of puts, and what a peer's remote key opens. The context owns
// it.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>

namespace kvrail {

class Region {
 public:
  // `memory`: "host", "cuda", "cuda-managed", "rocm". Throws when UCX sees another kind there: a device
  // pointer taken for host memory registers well and then transfers slowly, or faults.
  Region(ucp_context_h context, std::uint64_t address, std::uint64_t nbytes, const std::string& memory);
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool contains(std::uint64_t address, std::uint64_t nbytes) const {
    return address >= address_ && nbytes <= nbytes_ && address - address_ <= nbytes_ - nbytes;
  }
  std::uint64_t address() const { return address_; }
  std::uint64_t nbytes() const { return nbytes_; }
  const std::string& memory() const { return memory_; }
  bool is_host() const { return kind_ == UCS_MEMORY_TYPE_HOST; }
  ucs_memory_type_t kind() const { return kind_; }
  ucp_mem_h handle() const { return handle_; }

  std::string packed_key() const;
  // Only the context calls this, when no link lives. Idempotent.
  void unmap();

 private:
  const ucp_context_h context_;
  const std::uint64_t address_;
  const std::uint64_t nbytes_;
  const std::string memory_;
  ucs_memory_type_t kind_ = UCS_MEMORY_TYPE_HOST;
  ucp_mem_h handle_ = nullptr;
};

}  // namespace kvrail

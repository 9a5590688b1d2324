// SPDX-License-Identifier: Apache-2.0
// Memory that a GPU can address: its own that peers may map, the host's that is pinned, a peer's that is mapped here.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda_device.h"

namespace kvrail {

// A plain allocation of its own, zeroed, in whole blocks of 2 MiB: an IPC handle opens all of a block to the peer.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<CudaDevice> device, std::uint64_t nbytes);
  ~DeviceMemory() { close(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CuAddress address() const { return address_; }
  std::uint64_t nbytes() const { return nbytes_; }
  std::string ipc_handle() const;
  // Both wait for the copy. They order nothing with other streams.
  void read(std::uint64_t offset, void* to, std::uint64_t nbytes) const;
  void write(std::uint64_t offset, const void* from, std::uint64_t nbytes) const;
  // Idempotent. Only when no importer has it mapped any more.
  void close();
  // Never free it: a living peer may have it mapped. The end of the process does.
  void leave_open() { address_ = 0; }

 private:
  void copy(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t host, bool to_device) const;

  const std::shared_ptr<CudaDevice> device_;
  const std::uint64_t nbytes_;
  CuAddress address_ = 0;
};

// The caller's host memory, page-locked and mapped for every GPU of this process.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<CudaDevice> device, std::uint64_t address, std::uint64_t nbytes);
  ~PinnedMemory() { close(); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::uint64_t address() const { return address_; }
  std::uint64_t nbytes() const { return nbytes_; }
  void close();

 private:
  const std::shared_ptr<CudaDevice> device_;
  const std::uint64_t address_, nbytes_;
  std::vector<std::uint64_t> chunks_;
};

// Part of a peer's DeviceMemory. Closed when no pool and no copy needs it any more.
// How another process maps an allocation that somebody else made here, and where in it the address asked for lies.
struct ExportedMemory {
  std::string handle;
  std::uint64_t offset;
};
ExportedMemory export_memory(const CudaDevice& device, std::uint64_t address);

class PeerMemory {
 public:
  PeerMemory(std::shared_ptr<CudaDevice> device, std::string handle, std::uint64_t offset, std::uint64_t nbytes);
  ~PeerMemory() { device_->close_peer(handle_); }
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  CuAddress address() const { return address_; }

 private:
  const std::shared_ptr<CudaDevice> device_;
  const std::string handle_;
  CuAddress address_ = 0;
};

}  // namespace kvrail

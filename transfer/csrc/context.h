// SPDX-License-Identifier: Apache-2.0
// One ucp_context, the settings it was made with, and the list of memory registered in it.
#pragma once

#include <ucp/api/ucp.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvrail {

class Region;

class Context {
 public:
  // Settings are UCX names without the UCX_ prefix. One that UCX does not know, or refuses, throws.
  explicit Context(const std::map<std::string, std::string>& settings);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void require_open(const char* call) const;
  ucp_context_h handle() const { return handle_; }
  std::shared_ptr<Region> add_region(std::uint64_t address, std::uint64_t nbytes, const std::string& memory);
  // Throws while a link lives. Idempotent.
  void remove_region(const std::shared_ptr<Region>& region);
  // The open region that contains all of [address, address + nbytes), or null.
  std::shared_ptr<Region> find_region(std::uint64_t address, std::uint64_t nbytes) const;

  // "tcp/lo", "cma/memory", …: what this context may use.
  std::vector<std::string> transports() const;
  std::string describe() const;

  // Throws while a link lives; else unmaps every region. Idempotent.
  void close();

  // Links pin the registered memory: a peer may write at any time. Unpinning fails while one is open, and
  // waits for those that are closing.
  void link_opened();
  void link_closing();
  void link_closed(bool was_closing);

 private:
  void require_no_links(const char* call);

  ucp_context_h handle_ = nullptr;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Region>> regions_;
  int open_links_ = 0;
  int closing_links_ = 0;
};

}  // namespace kvrail

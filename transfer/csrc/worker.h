// SPDX-License-Identifier: Apache-2.0
// One ucp_worker. Made on any thread, then used by the reactor's thread alone.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

namespace kvrail {

class Worker {
 public:
  // `on_message(arg, header, header_length, data, length, param)` runs inside progress() for every active
  // message.
  Worker(ucp_context_h context, unsigned message_id, ucp_am_recv_callback_t on_message, void* arg);
  // Closes the worker's sockets and queue pairs: afterwards nothing that a peer posts to it can land any more
  // over tcp or rdma. Callbacks of requests that are still pending may never run.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  ucp_worker_h handle() const { return handle_; }
  const std::string& address() const { return address_; }
  // Without the transports that stay within one host: who connects to it can only use the others.
  const std::string& network_address() const { return network_address_; }
  int event_fd() const { return event_fd_; }
  unsigned progress() { return ucp_worker_progress(handle_); }
  // True: nothing to do until event_fd is readable. False: progress() first.
  bool arm();

 private:
  std::string pack_address(unsigned flags) const;

  ucp_worker_h handle_ = nullptr;
  std::string address_;
  std::string network_address_;
  int event_fd_ = -1;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// One ucp_ep in peer error mode: put, flush, active message, close. Used by the reactor's thread alone.
//
// Every call takes a callback that runs exactly once with the final status, also when the call completed or
// failed at once; except for requests that a destroyed worker swallowed, which the link accounts for.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvrail {

class RemoteKey;

class Endpoint {
 public:
  using Done = void (*)(void* user, ucs_status_t status);

  Endpoint(ucp_worker_h worker, const std::string& peer_address, ucp_err_handler_cb_t on_error, void* arg);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  ucp_ep_h handle() const { return handle_; }
  template <Done done>
  void put(const void* source, std::size_t nbytes, std::uint64_t target, const RemoteKey& key, ucp_mem_h memory,
           ucs_memory_type_t kind, void* user) {
    put_(source, nbytes, target, key, memory, kind, finished<done>, done, user);
  }
  template <Done done>
  void flush(void* user) {
    flush_(finished<done>, done, user);
  }
  // `header` and `payload` must live until `done`.
  template <Done done>
  void send(unsigned message_id, const void* header, std::size_t header_bytes, const std::string& payload, void* user) {
    send_(message_id, header, header_bytes, payload, finished<done>, done, user);
  }
  template <Done done>
  void close(bool force, void* user) {
    close_(force, finished<done>, done, user);
  }

  // "tcp/lo", "cma/memory", …: the lanes in use.
  std::vector<std::string> transports() const;
  std::string describe() const;

 private:
  template <Done done>
  static void finished(void* request, ucs_status_t status, void* user) {
    ucp_request_free(request);
    done(user, status);
  }
  void put_(const void*, std::size_t, std::uint64_t, const RemoteKey&, ucp_mem_h, ucs_memory_type_t,
            ucp_send_nbx_callback_t, Done, void*);
  void flush_(ucp_send_nbx_callback_t, Done, void*);
  void send_(unsigned, const void*, std::size_t, const std::string&, ucp_send_nbx_callback_t, Done, void*);
  void close_(bool, ucp_send_nbx_callback_t, Done, void*);

  ucp_ep_h handle_ = nullptr;
};

}  // namespace kvrail

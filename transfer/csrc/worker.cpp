// SPDX-License-Identifier: Apache-2.0
#include "worker.h"

#include "status.h"

namespace kvrail {

Worker::Worker(ucp_context_h context, unsigned message_id, ucp_am_recv_callback_t on_message, void* arg) {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  // Not SINGLE: the thread that makes the worker is another than the one that uses it.
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucp_worker_create(context, &params, &handle_), "ucp_worker_create");
  try {
    check(ucp_worker_get_efd(handle_, &event_fd_), "ucp_worker_get_efd");
    ucp_am_handler_param_t handler{};
    handler.field_mask =
        UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = message_id;
    handler.cb = on_message;
    handler.arg = arg;
    check(ucp_worker_set_am_recv_handler(handle_, &handler), "ucp_worker_set_am_recv_handler");
    ucp_address_t* bytes;
    std::size_t size;
    check(ucp_worker_get_address(handle_, &bytes, &size), "ucp_worker_get_address");
    address_.assign(reinterpret_cast<const char*>(bytes), size);
    ucp_worker_release_address(handle_, bytes);
  } catch (...) {
    ucp_worker_destroy(handle_);
    throw;
  }
}

Worker::~Worker() { ucp_worker_destroy(handle_); }

bool Worker::arm() { return ucp_worker_arm(handle_) == UCS_OK; }

}  // namespace kvrail

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
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = message_id;
    handler.cb = on_message;
    handler.arg = arg;
    check(ucp_worker_set_am_recv_handler(handle_, &handler), "ucp_worker_set_am_recv_handler");
    address_ = pack_address(0);
    network_address_ = pack_address(UCP_WORKER_ADDRESS_FLAG_NET_ONLY);
  } catch (...) {
    ucp_worker_destroy(handle_);
    throw;
  }
}

std::string Worker::pack_address(unsigned flags) const {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = flags;
  check(ucp_worker_query(handle_, &attributes), "ucp_worker_query");
  std::string address(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucp_worker_release_address(handle_, attributes.address);
  return address;
}

Worker::~Worker() { ucp_worker_destroy(handle_); }

bool Worker::arm() { return ucp_worker_arm(handle_) == UCS_OK; }

}  // namespace kvrail

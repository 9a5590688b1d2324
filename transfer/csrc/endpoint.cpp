// SPDX-License-Identifier: Apache-2.0
#include "endpoint.h"

#include <array>

#include "capture.h"
#include "rkey.h"
#include "status.h"

namespace kvrail {
namespace {

ucp_request_param_t with_callback(ucp_send_nbx_callback_t callback, void* user) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = callback;
  param.user_data = user;
  return param;
}

// A null request is done, an error pointer has failed, anything else will call back.
void settle(ucs_status_ptr_t request, Endpoint::Done done, void* user) {
  if (!UCS_PTR_IS_PTR(request)) done(user, UCS_PTR_RAW_STATUS(request));
}

}  // namespace

Endpoint::Endpoint(ucp_worker_h worker, const std::string& peer_address, ucp_err_handler_cb_t on_error, void* arg) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = arg;
  check(ucp_ep_create(worker, &params, &handle_), "ucp_ep_create");
}

void Endpoint::put_(const void* source, std::size_t nbytes, std::uint64_t target, const RemoteKey& key,
                    ucp_mem_h memory, ucs_memory_type_t kind, ucp_send_nbx_callback_t callback, Done done, void* user) {
  ucp_request_param_t param = with_callback(callback, user);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.memh = memory;
  param.memory_type = kind;
  settle(ucp_put_nbx(handle_, source, nbytes, target, key.handle(), &param), done, user);
}

void Endpoint::flush_(ucp_send_nbx_callback_t callback, Done done, void* user) {
  ucp_request_param_t param = with_callback(callback, user);
  settle(ucp_ep_flush_nbx(handle_, &param), done, user);
}

void Endpoint::send_(unsigned message_id, const void* header, std::size_t header_bytes, const std::string& payload,
                     ucp_send_nbx_callback_t callback, Done done, void* user) {
  ucp_request_param_t param = with_callback(callback, user);
  param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  // Rendezvous would need a matching receive call; a link message is small enough to be sent in fragments.
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.memory_type = UCS_MEMORY_TYPE_HOST;
  settle(ucp_am_send_nbx(handle_, message_id, header, header_bytes, payload.data(), payload.size(), &param), done,
         user);
}

void Endpoint::close_(bool force, ucp_send_nbx_callback_t callback, Done done, void* user) {
  ucp_request_param_t param = with_callback(callback, user);
  if (force) {
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  }
  settle(ucp_ep_close_nbx(handle_, &param), done, user);
}

std::vector<std::string> Endpoint::transports() const {
  std::array<ucp_transport_entry_t, 64> entries{};
  ucp_ep_attr_t attributes{};
  attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
  attributes.transports.entries = entries.data();
  attributes.transports.num_entries = entries.size();
  attributes.transports.entry_size = sizeof(ucp_transport_entry_t);
  check(ucp_ep_query(handle_, &attributes), "ucp_ep_query");
  std::vector<std::string> names;
  for (unsigned i = 0; i < attributes.transports.num_entries; ++i)
    names.push_back(std::string(entries[i].transport_name) + "/" + entries[i].device_name);
  return names;
}

std::string Endpoint::describe() const {
  return captured([this](FILE* stream) { ucp_ep_print_info(handle_, stream); });
}

}  // namespace kvrail

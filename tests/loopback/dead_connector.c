// SPDX-License-Identifier: Apache-2.0
// What a peer that dies right after connecting to us does to our endpoint to it, with UCX settings given as NAME=VALUE.
//
// The order of events is fixed: its connection is accepted, it resets that connection, our endpoint takes the
// connection over and finds nobody to connect to anew. Prints how the endpoint ended.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

// Far more than anything here takes.
enum { kTurns = 100000 };

static ucs_status_t ended = UCS_OK;

static void must(ucs_status_t status, const char* call) {
  if (status == UCS_OK) return;
  printf("%s: %s\n", call, ucs_status_string(status));
  exit(2);
}

static void on_error(void* arg, ucp_ep_h endpoint, ucs_status_t status) {
  (void)arg, (void)endpoint;
  ended = status;
}

static ucp_worker_h make_worker(ucp_context_h context, ucp_address_t** address) {
  ucp_worker_params_t params = {.field_mask = 0};
  ucp_worker_h worker;
  size_t length;
  must(ucp_worker_create(context, &params, &worker), "ucp_worker_create");
  must(ucp_worker_get_address(worker, address, &length), "ucp_worker_get_address");
  return worker;
}

static ucs_status_t connect_to(const ucp_address_t* address, ucp_worker_h worker, ucp_ep_h* endpoint) {
  ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .address = address,
                            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {.cb = on_error}};
  return ucp_ep_create(worker, &params, endpoint);
}

static void progress(ucp_worker_h worker) {
  for (int i = 0; i < kTurns && ended == UCS_OK; ++i) ucp_worker_progress(worker);
}

int main(int count, char** settings) {
  ucp_config_t* config;
  must(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
  for (int i = 1; i < count; ++i) {
    char* value = strchr(settings[i], '=');
    *value = '\0';
    must(ucp_config_modify(config, settings[i], value + 1), settings[i]);
  }
  ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                         .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
  ucp_context_h ours, theirs;
  must(ucp_init(&params, config, &ours), "ucp_init");
  must(ucp_init(&params, config, &theirs), "ucp_init");
  ucp_address_t *address, *peer_address;
  ucp_worker_h worker = make_worker(ours, &address), peer = make_worker(theirs, &peer_address);
  ucp_ep_h endpoint, peer_endpoint;
  must(connect_to(address, peer, &peer_endpoint), "connecting to us");
  progress(worker);
  // It never ran: our answer to its connection is unread, so this resets the connection.
  ucp_worker_destroy(peer);
  ucs_status_t status = connect_to(peer_address, worker, &endpoint);
  if (status == UCS_OK) {
    progress(worker);
    status = ended;
    ucp_request_param_t force = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t closing = ucp_ep_close_nbx(endpoint, &force);
    while (UCS_PTR_IS_PTR(closing) && ucp_request_check_status(closing) == UCS_INPROGRESS) ucp_worker_progress(worker);
  }
  ucp_worker_destroy(worker);
  ucp_cleanup(ours);
  ucp_cleanup(theirs);
  printf("%s\n", ucs_status_string(status));
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// A peer's remote key, unpacked for one endpoint. Destroyed before that endpoint's worker.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "status.h"

namespace kvrail {

class RemoteKey {
 public:
  RemoteKey(ucp_ep_h endpoint, const std::string& packed) {
    check(ucp_ep_rkey_unpack(endpoint, packed.data(), &handle_), "ucp_ep_rkey_unpack");
  }
  ~RemoteKey() { ucp_rkey_destroy(handle_); }
  RemoteKey(const RemoteKey&) = delete;
  RemoteKey& operator=(const RemoteKey&) = delete;

  ucp_rkey_h handle() const { return handle_; }

 private:
  ucp_rkey_h handle_ = nullptr;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// A UCX status that is not OK, as the one native exception.
#pragma once

#include <ucs/type/status.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace kvrail {

class UcxError : public std::runtime_error {
 public:
  UcxError(std::string call, ucs_status_t status, std::string text)
      : std::runtime_error(call + ": " + text), call(std::move(call)), status(status), text(std::move(text)) {}
  UcxError(std::string call, ucs_status_t status) : UcxError(std::move(call), status, ucs_status_string(status)) {}

  const std::string call;
  const ucs_status_t status;
  const std::string text;
};

inline void check(ucs_status_t status, const char* call) {
  if (status != UCS_OK) throw UcxError(call, status);
}

}  // namespace kvrail

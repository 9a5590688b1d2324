// SPDX-License-Identifier: Apache-2.0
// UCX writes its log to stdout, which may carry a protocol: send it to stderr instead.
#pragma once

namespace kvrail {

// For the whole process, since UCX's log is. UCX_LOG_LEVEL stays in force, UCX_LOG_FILE does not.
void log_to_stderr();

}  // namespace kvrail

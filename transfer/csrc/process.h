// SPDX-License-Identifier: Apache-2.0
// What UCX does to the whole process by being loaded, put right.
#pragma once

namespace kvrail {

// The log goes to stderr: stdout may carry a protocol. UCX_LOG_LEVEL stays in force, UCX_LOG_FILE does not.
// SIGHUP ends the process again (UCX takes it for a debugging aid), or does what was set before UCX came.
void tame_ucx();

}  // namespace kvrail

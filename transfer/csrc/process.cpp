// SPDX-License-Identifier: Apache-2.0
#include "process.h"

#include <signal.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace kvrail {
namespace {

ucs_log_func_rc_t write_line(const char* file, unsigned line, const char*, ucs_log_level_t level,
                             const ucs_log_component_config_t* component, const char* format, va_list args) {
  if (level > component->log_level) return UCS_LOG_FUNC_RC_STOP;
  char text[1024];
  std::vsnprintf(text, sizeof text, format, args);
  const char* slash = std::strrchr(file, '/');
  std::fprintf(stderr, "[%d] UCX %s %s:%u %s\n", static_cast<int>(getpid()), ucs_log_level_names[level],
               slash == nullptr ? file : slash + 1, line, text);
  return UCS_LOG_FUNC_RC_STOP;
}

}  // namespace

void tame_ucx() {
  ucs_log_push_handler(write_line);
  ucs_debug_disable_signal(SIGHUP);
}

}  // namespace kvrail

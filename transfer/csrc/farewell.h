// SPDX-License-Identifier: Apache-2.0
// The way of an endpoint to the moment when its worker may be destroyed. For the thread that owns both.
#pragma once

#include "clock.h"
#include "endpoint.h"

namespace kvrail {

class Farewell {
 public:
  // The first call counts.
  void begin(bool force, Nanos now) {
    if (begun_) return;
    begun_ = true;
    force_ = force;
    deadline_ = now + (force ? kForcedEnd : kPeacefulEnd);
  }
  bool begun() const { return begun_; }

  // Takes the next step; true when the worker may go. `cpu_puts`: puts are under way that this very process carries
  // out. `busy`: any request is. `endpoint` may be null.
  bool step(Nanos now, Endpoint* endpoint, bool cpu_puts, bool busy) {
    // Such puts (cma) always end, whatever the peer does; UCX aborts the process when their endpoint is destroyed
    // before that.
    if (cpu_puts) return false;
    if (force_ && now < deadline_ && busy) return false;
    if (endpoint != nullptr && !close_begun_) {
      close_begun_ = closing_ = true;
      endpoint->close<on_close_done>(force_, this);
    }
    return !closing_ || now >= deadline_;
  }

 private:
  // By force: time for the callbacks of what is under way; what has not called back by then is counted as failed. In
  // peace: time for the last messages to go out.
  static constexpr Nanos kForcedEnd = 20 * kMilli;
  static constexpr Nanos kPeacefulEnd = 300 * kMilli;

  static void on_close_done(void* farewell, ucs_status_t) { static_cast<Farewell*>(farewell)->closing_ = false; }

  bool begun_ = false, force_ = false;
  bool close_begun_ = false, closing_ = false;
  Nanos deadline_ = 0;
};

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// A thread with a name, that takes no signals: they are for Python's main thread, whose waits they must end.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace kvrail {

// No signals come to this thread while it lives. Threads inherit that.
class SignalsHeld {
 public:
  SignalsHeld() {
    sigset_t all;
    sigfillset(&all);
    // These mean a fault of the thread itself; faulthandler wants to see them.
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsHeld() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeld(const SignalsHeld&) = delete;
  SignalsHeld& operator=(const SignalsHeld&) = delete;

 private:
  sigset_t before_;
};

template <typename Work>
std::thread start_thread(const char* name, Work work) {
  SignalsHeld held;
  std::thread thread(std::move(work));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace kvrail

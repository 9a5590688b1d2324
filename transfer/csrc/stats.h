// SPDX-License-Identifier: Apache-2.0
// What the reactor counts. Written by its threads, read by anyone.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvrail {

struct Stats {
  using Count = std::atomic<std::uint64_t>;
  Count turns = 0, sleeps = 0, commands = 0;
  Count light_turns = 0;  // taken by threads that had something small to do
  Count messages_sent = 0, messages_received = 0;
  Count messages_early = 0;       // held until those before them came
  Count messages_duplicate = 0;   // dropped
  Count messages_wrong_link = 0;  // dropped: another cookie than this link's
  Count puts = 0, put_bytes = 0, rail_puts = 0, copies = 0, copied_bytes = 0, gpu_slices = 0, gpu_bytes = 0;
  Count gpu_ns = 0;  // while the GPU had copies to do, as the progress thread saw it
  Count stream_frames = 0, stream_bytes = 0, stream_frames_received = 0, stream_bytes_received = 0;
  Count stream_strangers = 0;  // who knew a listener's port and not its secret
};

}  // namespace kvrail

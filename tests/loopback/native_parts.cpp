// SPDX-License-Identifier: Apache-2.0
// The parts of the native module that need no UCX and whose hard cases no link of this machine produces.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "control.h"
#include "ordered.h"
#include "stream_copy.h"

using kvrail::Control;
using kvrail::Ordered;

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

void messages_in_any_order_come_out_in_order() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::uint64_t> numbers(40);
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = i;
    std::shuffle(numbers.begin(), numbers.end(), random);
    Ordered inbox;
    std::vector<std::string> came;
    auto deliver = [&](std::string message) { came.push_back(std::move(message)); };
    for (std::uint64_t number : numbers) {
      bool expected = number == came.size();
      auto verdict = inbox.accept(number, std::to_string(number), deliver);
      EXPECT(verdict == (expected ? Ordered::Verdict::delivered : Ordered::Verdict::held));
      EXPECT(inbox.accept(number, "again", deliver) == Ordered::Verdict::duplicate);
    }
    EXPECT(came.size() == numbers.size());
    for (std::size_t i = 0; i < came.size(); ++i) EXPECT(came[i] == std::to_string(i));
  }
}

void a_gap_that_is_never_filled_is_bounded() {
  Ordered inbox;
  auto deliver = [](std::string) { EXPECT(false); };
  std::uint64_t number = 1;
  while (inbox.accept(number, "", deliver) == Ordered::Verdict::held) ++number;
  EXPECT(inbox.accept(number, "", deliver) == Ordered::Verdict::flood);
  EXPECT(number > 1000);
}

void copies_of_every_size_and_alignment_are_exact() {
  std::vector<char> source(70000), target(70000);
  std::mt19937 random(2);
  for (char& byte : source) byte = static_cast<char>(random());
  for (std::size_t nbytes : {0, 1, 63, 64, 65, 127, 128, 129, 4095, 4096, 16383, 16384, 16385, 20000, 32768, 65600}) {
    for (std::size_t from : {0, 1, 8, 63}) {
      for (std::size_t to : {0, 1, 16, 63, 64}) {
        std::fill(target.begin(), target.end(), 0x55);
        kvrail::stream_copy(target.data() + to, source.data() + from, nbytes);
        kvrail::stream_fence();
        EXPECT(std::memcmp(target.data() + to, source.data() + from, nbytes) == 0);
        for (std::size_t i = 0; i < to; ++i) EXPECT(target[i] == 0x55);
        for (std::size_t i = to + nbytes; i < target.size(); ++i) EXPECT(target[i] == 0x55);
      }
    }
  }
}

void a_beat_that_waits_unread_is_told() {
  std::array<int, 2> ends;
  EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  int epoll_fd = epoll_create1(0);
  constexpr kvrail::Nanos kPause = 20'000'000;
  Control control(ends[0], epoll_fd, 1, 1'000'000'000);
  EXPECT(!control.peer_beat().unread);
  const std::string frame("\3\0\0\0one", 7);
  EXPECT(write(ends[1], frame.data(), frame.size()) == 7);
  usleep(kPause / 1000);
  // The reactor's thread does not come round to it.
  auto before = control.peer_beat();
  EXPECT(before.unread && before.age >= kPause && before.payload.empty());
  EXPECT(control.on_ready());
  auto after = control.peer_beat();
  EXPECT(!after.unread && after.age < before.age && after.payload == "one");
  close(ends[1]);
  EXPECT(!control.on_ready() && !control.peer_beat().unread);
  control.end();
  EXPECT(!control.peer_beat().unread);
  close(epoll_fd);
}

int main() {
  a_beat_that_waits_unread_is_told();
  messages_in_any_order_come_out_in_order();
  a_gap_that_is_never_filled_is_bounded();
  copies_of_every_size_and_alignment_are_exact();
  std::puts("ok");
}

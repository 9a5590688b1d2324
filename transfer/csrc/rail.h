// SPDX-License-Identifier: Apache-2.0
// One more way of a link's puts beside its own worker: a worker, an endpoint and a thread of their own.
//
// A page keeps the thread that puts it busy (over cma it copies, over tcp it makes a system call), so a large batch is
// dealt out: its writer's link and the rails each take the next run when they have room. What one of them took is done
// when its puts are OK and a flush behind them is OK; the writer rings when all of them say so.
//
// Only the writing side has rails. At the peer all of them end in the one worker of the link, and end with it: what
// fences the link there fences its rails.
//
// Threads: the reactor's thread makes a rail, orders, and destroys it once it is over. Worker, endpoint, keys, shares
// and window are the rail's own thread's. The two meet in the queue of orders (under the mutex), in the batches (each
// has a lock for its cursor) and in the writers (whose counters and permissions any thread may use); what a rail has
// to say it posts to the reactor.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "batch.h"
#include "clock.h"
#include "endpoint.h"
#include "farewell.h"
#include "put_window.h"
#include "worker.h"

namespace kvrail {

class Link;
class Writer;

// What a rail, and the link of a batch that is dealt out, has under way at most: the less, the more evenly all end. Two
// progress calls of cma copy as much.
inline constexpr std::uint64_t kDealtBytes = 1 << 20;
// And a run of such a batch.
inline constexpr std::uint64_t kDealtRun = 512 << 10;

class Rail {
 public:
  // `transports`: those of the link's own endpoint. A rail that gets others fails, as its writes would end otherwise.
  Rail(Link& link, unsigned number, std::string peer_address, std::vector<std::string> transports);
  ~Rail();
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // Take part in this batch. Link::share_done() follows if something is taken, and always when the rail carries it
  // alone.
  void carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch);
  // Give everything back; Link::rail_over() follows, after the last share_done().
  void end(bool force);

 private:
  // What this rail takes of one batch.
  struct Share {
    std::shared_ptr<Writer> writer;
    std::shared_ptr<Batch> batch;
    std::uint32_t puts_out = 0;
    bool awaited = false;  // the writer waits for it: it has taken something, or carries the batch alone
    bool over = false;     // takes nothing more
    bool refused = false;  // though there may have been more
    bool unflushed = false, flushing = false;
    ucs_status_t status = UCS_OK;
    const RemoteKey* key = nullptr;
  };
  using Window = PutWindow<Rail, Share>;
  using Order = std::function<void()>;

  static ucs_status_t on_message(void*, const void*, size_t, void*, size_t, const ucp_am_recv_param_t*);
  static void on_error(void* rail, ucp_ep_h, ucs_status_t status);
  static void on_put_done(void* put, ucs_status_t status);
  static void on_flush_done(void* share, ucs_status_t status);

  void order(Order order);
  void run();
  void open();
  bool take_orders();
  bool advance();
  bool post_some(Share& share);
  bool settled(Share& share);
  void fail(ucs_status_t status, std::string reason);
  const RemoteKey& key_of(Share& share);
  void report(Share& share);
  bool busy() const;
  void destroy();
  void sleep();

  Link& link_;
  const unsigned number_;
  const std::string peer_address_;
  const std::vector<std::string> transports_;
  int wake_fd_ = -1;

  std::mutex mutex_;
  std::vector<Order> orders_;
  std::atomic<bool> pending_ = false;
  std::atomic<bool> sleeping_ = false;

  std::unique_ptr<Worker> worker_;
  std::unique_ptr<Endpoint> endpoint_;
  ucs_status_t error_ = UCS_OK;
  bool error_told_ = false;
  // By their packed form. Not by pool: what a pool holds belongs to the link's worker, and is dropped by its thread.
  std::map<std::string, std::unique_ptr<RemoteKey>> keys_;
  std::list<Share> shares_;
  Window window_{kDealtBytes};
  Farewell farewell_;

  std::thread thread_;
};

}  // namespace kvrail

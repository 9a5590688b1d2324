// SPDX-License-Identifier: Apache-2.0
// One peer: a worker of its own, the endpoint, the peer's pools, the writers, the messages in order.
//
// The public calls of the first group come from any thread and only leave a command for the reactor; all
// state below is touched by the reactor's thread alone, except where it says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "batch.h"
#include "control.h"
#include "copy.h"
#include "cuda_copy.h"
#include "endpoint.h"
#include "events.h"
#include "farewell.h"
#include "ordered.h"
#include "put_window.h"
#include "rail.h"
#include "stats.h"
#include "stream_reader.h"
#include "stream_writer.h"
#include "worker.h"

namespace kvrail {

class Context;
class Reactor;
class Writer;

class Link : public std::enable_shared_from_this<Link> {
 public:
  Link(Reactor& reactor, std::uint32_t id, std::uint32_t epoch, std::uint64_t cookie);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Any thread.
  std::uint32_t id() const { return id_; }
  std::uint32_t epoch() const { return epoch_; }
  const std::string& address(bool network_only) const { return network_only ? network_address_ : address_; }
  void connect(std::string peer_address);
  // So many ways for puts in all, this link's own worker among them; once, after connect().
  void open_rails(unsigned count);
  static constexpr unsigned kMostRails = 16;
  std::vector<std::string> transports();
  std::string describe();
  // `key`: for puts, else empty.
  void import_pool(std::uint32_t id, std::shared_ptr<Pool> pool, std::string key);
  // Lane stream, of which a link has one end or none; once. Throws when a target is not registered host memory.
  void read_stream(Fd listener, const StreamSecret& secret, StreamReader::Targets targets);
  void write_stream(Fd connection, const StreamSecret& secret);
  // The lane is decided: if it is this one, its failure is the link's from now on; else its end is given back.
  void settle_stream(bool used);
  void attach_control(int fd, Nanos interval);
  void set_beat(std::string payload);
  Control::PeerBeat peer_beat() const;
  void send(std::string message);
  void flush(std::uint64_t token);
  void fence();
  void close();
  std::shared_ptr<Writer> open_writer(std::uint64_t key, Nanos ttl);
  void on_writer(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act);
  // What an act starts at most: the copying of `units` units of a pool, the way that is wished.
  struct Load {
    std::uint32_t pool;
    std::size_t units;
    Way way;
  };
  static constexpr Load kNoLoad{0, 0, Way::best};
  void on_writer_light(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act, Load load = kNoLoad);
  // False from fence(), close() or the first error of the endpoint on: nothing may be posted any more.
  bool usable() const { return usable_; }
  Reactor& reactor() { return reactor_; }
  // Known before the first rail is opened.
  bool puts_by_cpu() const { return puts_by_cpu_; }

  // The reactor's thread.
  unsigned turn(Nanos now, int most_progress);
  bool arm() { return !worker_ || worker_->arm(); }
  void on_control_ready();
  Nanos next_deadline() const;
  // Requests of ours are under way.
  bool busy() const { return phase_ == Phase::ending || busy_requests(); }
  // More than a message of the peer is waited for.
  bool needs_turns() const { return busy() || closed() || held_ || error_ != UCS_OK || !scheduled_.empty(); }
  bool puts_out() const { return !window_.empty(); }
  // A writer waits for the GPU, which wakes nobody.
  bool holds() const { return held_; }
  bool closed() const { return phase_ == Phase::closed; }
  void begin_close();

  // For the writers.
  Context& context();
  Stats& stats();
  CopyCrew* crew();
  std::shared_ptr<Pool> pool(std::uint32_t id) const;
  // `dealt`: for a batch that rails take from as well.
  bool window_open(bool dealt) const { return dealt ? window_.open(kDealtBytes) : window_.open(); }
  // Lets rail `number` carry the batch alone, whether it has proven itself or not. False: there is none of that number.
  bool carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch, unsigned number);
  // Lets every rail that has carried something take part in the batch. False: there is none.
  bool deal_out(const std::shared_ptr<Writer>& writer, const std::shared_ptr<Batch>& batch);
  void share_done(const std::shared_ptr<Writer>& writer, unsigned number, bool refused, ucs_status_t status);
  void rail_failed(unsigned number, ucs_status_t status, const std::string& reason);
  void rail_over(unsigned number);
  // A writer has more to do that nothing will wake us for: no sleep after this turn.
  void go_on() { ++posted_; }
  void hold() { held_ = true; }
  // False: there is no writing end (any more). Else Writer::share_done() follows.
  bool stream(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch);
  // From the stream's thread.
  void stream_done(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch, bool refused, ucs_status_t status,
                   std::string reason);
  // `forbidden`: the peer did what no peer does.
  void stream_failed(const std::string& reason, bool forbidden);
  void stream_over();
  void put(Writer& writer, const Batch& batch, const Run& run);
  void copy(std::shared_ptr<CopyJob> job);
  void copy_done(const CopyJob& job);
  // Null without a CUDA device.
  CudaCopier* gpu();
  const GpuSlice& gpu_copy(std::shared_ptr<Writer> writer, const std::shared_ptr<Batch>& batch);
  void slice_done(const GpuSlice& slice);
  void flush_for(std::shared_ptr<Writer> writer);
  void send_for(std::shared_ptr<Writer> writer, std::string message);
  void tell(EventKind kind, std::uint64_t key, int status, std::string payload);

 private:
  static constexpr unsigned kMessageId = 1;
  enum class Phase { open, ending, fenced, closed };
  // A flush or a message under way.
  struct Operation {
    Link* link;
    std::list<Operation>::iterator self;
    std::shared_ptr<Writer> writer;  // null: Link.flush or Link.send
    bool is_flush;
    std::uint64_t token;
    std::uint64_t header[2];  // cookie, number
    std::string message;
  };

  static ucs_status_t on_message(void*, const void*, size_t, void*, size_t, const ucp_am_recv_param_t*);
  static void on_error(void* link, ucp_ep_h, ucs_status_t status);
  static void on_put_done(void* put, ucs_status_t status);
  static void on_operation_done(void* operation, ucs_status_t status);

  static std::function<void(Link&)> acting(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act);
  template <typename Result>
  Result ask(const char* call, std::function<Result(const Endpoint&)> question);
  void run_writers();
  void command(std::function<void(Link&)> act);
  void light_command(std::function<void(Link&)> act, Load load = kNoLoad);
  bool light(const Load& load) const;
  void schedule(std::shared_ptr<Writer> writer);
  void break_off(ucs_status_t status, const std::string& reason);
  void lose_writers(ucs_status_t status, const std::string& reason);
  void start_operation(bool is_flush, std::shared_ptr<Writer> writer, std::uint64_t token, std::string message);
  void open_stream(std::function<void(Link&)> open);
  void end_stream();
  void begin_end(const char* reason, bool force);
  void step_end(Nanos now);
  bool busy_requests() const { return !window_.empty() || !operations_.empty(); }
  void destroy_worker();
  void drop_control();

  Reactor& reactor_;
  const std::uint32_t id_;
  const std::uint32_t epoch_;
  const std::uint64_t cookie_;
  std::atomic<bool> usable_ = true;
  std::atomic<bool> close_asked_ = false;

  std::unique_ptr<Worker> worker_;
  std::string address_, network_address_;
  std::unique_ptr<Endpoint> endpoint_;
  std::string peer_address_;
  ucs_status_t error_ = UCS_OK;
  bool error_told_ = false;
  std::map<std::uint32_t, std::shared_ptr<Pool>> pools_;
  std::vector<std::shared_ptr<Pool>> replaced_;  // by another import of their id
  std::uint64_t next_number_ = 0;
  Ordered inbox_;

  std::unordered_set<std::shared_ptr<Writer>> writers_;
  std::vector<std::shared_ptr<Writer>> scheduled_, running_;
  unsigned posted_ = 0;  // in this turn
  bool held_ = false;    // likewise
  PutWindow<Link, Writer> window_{std::uint64_t{64} << 20};
  struct OpenRail {
    std::unique_ptr<Rail> rail;  // until it is over
    bool proven = false;         // it has carried something
  };
  std::vector<OpenRail> rails_;  // number 1 first
  unsigned rails_running_ = 0;
  std::unique_ptr<StreamReader> reader_;    // until it is over
  std::unique_ptr<StreamWriter> streamer_;  // likewise
  bool stream_used_ = false, stream_ended_ = false;
  std::string stream_fault_;
  std::list<Operation> operations_;
  std::uint32_t copies_out_ = 0;

  Phase phase_ = Phase::open;
  bool fencing_ = false, closing_ = false;
  bool puts_by_cpu_ = false;
  Farewell farewell_;

  std::shared_ptr<Control> beats_;
  mutable std::mutex control_mutex_;
  std::shared_ptr<Control> control_;  // the same, for the other threads; stays when the stream is over
};

}  // namespace kvrail

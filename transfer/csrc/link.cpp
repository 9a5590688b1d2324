// SPDX-License-Identifier: Apache-2.0
#include "link.h"

#include <algorithm>
#include <future>
#include <limits>
#include <system_error>
#include <utility>

#include "context.h"
#include "reactor.h"
#include "status.h"
#include "writer.h"

namespace kvrail {
namespace {

// What the thread that orders a push copies itself: as much as keeps its call short.
constexpr std::uint64_t kLightBytes = 64 << 10;
constexpr std::size_t kLightUnits = 4;

}  // namespace

Link::Link(Reactor& reactor, std::uint32_t id, std::uint32_t epoch, std::uint64_t cookie)
    : reactor_(reactor), id_(id), epoch_(epoch), cookie_(cookie) {
  worker_ = std::make_unique<Worker>(reactor.context().handle(), kMessageId, on_message, this);
  address_ = worker_->address();
  network_address_ = worker_->network_address();
  reactor_.watch_worker(worker_->event_fd(), id_);
  context().link_opened();
}

Link::~Link() {
  if (phase_ == Phase::closed) return;
  // Never reached the reactor's thread: it was closing when this link was opened.
  destroy_worker();
  context().link_closed(close_asked_);
}

Context& Link::context() { return reactor_.context(); }
Stats& Link::stats() { return reactor_.stats(); }
CopyCrew* Link::crew() { return reactor_.crew(); }
CudaCopier* Link::gpu() { return reactor_.gpu(); }

void Link::command(std::function<void(Link&)> act) {
  reactor_.post([self = shared_from_this(), act = std::move(act)] { act(*self); });
}

void Link::connect(std::string peer_address) {
  command([peer_address = std::move(peer_address)](Link& link) {
    if (!link.usable()) return;
    try {
      link.endpoint_ = std::make_unique<Endpoint>(link.worker_->handle(), peer_address, on_error, &link);
      link.peer_address_ = peer_address;
      for (const std::string& lane : link.endpoint_->transports())
        if (lane.starts_with("cma/") || lane.starts_with("knem/")) link.puts_by_cpu_ = true;
    } catch (const UcxError& error) {
      link.break_off(error.status, error.what());
    }
  });
}

void Link::open_rails(unsigned count) {
  command([count](Link& link) {
    if (!link.usable() || !link.endpoint_ || !link.rails_.empty()) return;
    try {
      const std::vector<std::string> transports = link.endpoint_->transports();
      for (unsigned number = 1; number < count; ++number) {
        link.rails_.push_back({std::make_unique<Rail>(link, number, link.peer_address_, transports)});
        ++link.rails_running_;
      }
    } catch (const UcxError& error) {
      link.break_off(error.status, error.what());
    } catch (const std::system_error&) {
      // No file descriptor, or no thread, for so many: who wants to use the others is told that they do not exist.
    }
  });
}

template <typename Result>
Result Link::ask(const char* call, std::function<Result(const Endpoint&)> question) {
  auto promise = std::make_shared<std::promise<Result>>();
  auto future = promise->get_future();
  command([promise = std::move(promise), question = std::move(question)](Link& link) {
    try {
      promise->set_value(link.endpoint_ ? question(*link.endpoint_) : Result{});
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  });
  if (future.wait_for(std::chrono::seconds(5)) != std::future_status::ready)
    throw UcxError(call, UCS_ERR_TIMED_OUT, "the progress thread does not answer");
  try {
    return future.get();
  } catch (const std::future_error&) {
    throw UcxError(call, UCS_ERR_CANCELED, "the reactor is closed");
  }
}

std::vector<std::string> Link::transports() {
  return ask<std::vector<std::string>>("transports", [](const Endpoint& endpoint) { return endpoint.transports(); });
}

std::string Link::describe() {
  return ask<std::string>("describe", [](const Endpoint& endpoint) { return endpoint.describe(); });
}

void Link::import_pool(std::uint32_t id, std::shared_ptr<Pool> pool, std::string key) {
  command([id, pool = std::move(pool), key = std::move(key)](Link& link) {
    if (!link.usable()) return;
    try {
      if (!key.empty()) {
        if (!link.endpoint_) throw UcxError("import_put", UCS_ERR_NOT_CONNECTED, "connect() comes first");
        pool->key = std::make_shared<RemoteKey>(link.endpoint_->handle(), key);
        pool->packed_key = key;
      }
      if (auto older = link.pool(id)) {
        pool->keep_ways_of(*older);
        // UCX reads the key of a put until the put is over.
        link.replaced_.push_back(std::move(older));
      }
      link.pools_[id] = pool;
    } catch (const UcxError& error) {
      link.break_off(error.status, error.what());
    }
  });
}

void Link::light_command(std::function<void(Link&)> act, Load load) {
  reactor_.post_light(
      *this, [this, load] { return light(load); }, [self = shared_from_this(), act = std::move(act)] { act(*self); });
}

bool Link::light(const Load& load) const {
  if (!usable() || needs_turns()) return false;
  if (load.units == 0) return true;
  auto to = pool(load.pool);
  if (!to) return false;
  // Other threads do it.
  const Way way = to->choose(load.way);
  if (way == Way::stream || (way == Way::shm && reactor_.crew() != nullptr)) return true;
  return load.units <= kLightUnits && load.units * to->unit_bytes <= kLightBytes;
}

void Link::send(std::string message) {
  light_command([message = std::move(message)](Link& link) mutable {
    // Lost with the link: its error, or its end, is told by another event.
    if (link.usable()) link.start_operation(false, nullptr, 0, std::move(message));
  });
}

void Link::flush(std::uint64_t token) {
  command([token](Link& link) {
    if (link.usable()) return link.start_operation(true, nullptr, token, {});
    link.tell(EventKind::flushed, token, UCS_ERR_CONNECTION_RESET, {});
  });
}

std::shared_ptr<Writer> Link::open_writer(std::uint64_t key, Nanos ttl) {
  auto writer = std::make_shared<Writer>(*this, key, ttl);
  on_writer_light(writer, [](Writer& writer) {
    Link& link = writer.link();
    link.writers_.insert(writer.shared_from_this());
    if (!link.usable()) writer.link_lost(UCS_ERR_CONNECTION_RESET, "the link is gone");
  });
  return writer;
}

std::function<void(Link&)> Link::acting(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act) {
  return [writer = std::move(writer), act = std::move(act)](Link& link) {
    act(*writer);
    link.schedule(writer);
    // No turn will come any more that could answer a late stop().
    if (link.closed()) link.run_writers();
  };
}

void Link::on_writer(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act) {
  command(acting(std::move(writer), std::move(act)));
}

void Link::on_writer_light(std::shared_ptr<Writer> writer, std::function<void(Writer&)> act, Load load) {
  light_command(acting(std::move(writer), std::move(act)), load);
}

void Link::schedule(std::shared_ptr<Writer> writer) {
  if (std::exchange(writer->scheduled, true)) return;
  scheduled_.push_back(std::move(writer));
}

void Link::run_writers() {
  running_.swap(scheduled_);
  for (auto& writer : running_) {
    writer->scheduled = false;
    if (writer->advance()) schedule(writer);
    if (writer->over()) writers_.erase(writer);
  }
  running_.clear();
  // Whoever got nothing goes first next time, or a writer that comes early in the list takes every put that ends.
  std::stable_partition(scheduled_.begin(), scheduled_.end(), [](const auto& writer) { return writer->waits(); });
}

unsigned Link::turn(Nanos now, int most_progress) {
  unsigned work = 0;
  for (int i = 0; worker_ && i < most_progress; ++i) {
    unsigned count = worker_->progress();
    work += count;
    if (count == 0) break;
  }
  // Before any writer looks at a flush that came back OK in the same breath.
  if (error_ != UCS_OK && !error_told_)
    break_off(error_, std::string("the UCX endpoint failed: ") + ucs_status_string(error_));
  posted_ = 0;
  held_ = false;
  run_writers();
  if (beats_ && !beats_->on_time(now)) drop_control();
  if (phase_ == Phase::ending || (phase_ == Phase::fenced && closing_)) step_end(now);
  return work + posted_;
}

Nanos Link::next_deadline() const { return beats_ ? beats_->next_beat() : std::numeric_limits<Nanos>::max(); }

std::shared_ptr<Pool> Link::pool(std::uint32_t id) const {
  auto found = pools_.find(id);
  return found == pools_.end() ? nullptr : found->second;
}

void Link::put(Writer& writer, const Batch& batch, const Run& run) {
  auto* put = window_.take(this, &writer, run.units, run.nbytes);
  ++posted_;
  ++stats().puts;
  stats().put_bytes += run.nbytes;
  endpoint_->put<on_put_done>(reinterpret_cast<const void*>(run.source), run.nbytes, batch.pool->base + run.target,
                              *batch.pool->key, batch.region->handle(), batch.region->kind(), put);
}

void Link::on_put_done(void* user, ucs_status_t status) {
  auto* put = static_cast<PutWindow<Link, Writer>::Put*>(user);
  Link& link = *put->owner;
  Writer& writer = *put->what;
  std::uint32_t units = put->units;
  link.window_.give_back(put);
  writer.put_done(units, status);
  link.schedule(writer.shared_from_this());
}

bool Link::carry(std::shared_ptr<Writer> writer, std::shared_ptr<Batch> batch, unsigned number) {
  if (number > rails_.size()) return false;
  rails_[number - 1].rail->carry(std::move(writer), std::move(batch));
  return true;
}

bool Link::deal_out(const std::shared_ptr<Writer>& writer, const std::shared_ptr<Batch>& batch) {
  bool dealt = false;
  for (const OpenRail& each : rails_) {
    if (!each.proven) continue;
    each.rail->carry(writer, batch);
    dealt = true;
  }
  return dealt;
}

void Link::share_done(const std::shared_ptr<Writer>& writer, unsigned number, bool refused, ucs_status_t status) {
  if (status == UCS_OK && !refused) rails_[number - 1].proven = true;
  writer->share_done(refused, status);
  schedule(writer);
}

void Link::copy(std::shared_ptr<CopyJob> job) {
  ++copies_out_;
  crew()->submit(std::move(job));
}

void Link::copy_done(const CopyJob& job) {
  --copies_out_;
  job.writer->copy_done(job);
  schedule(job.writer);
}

const GpuSlice& Link::gpu_copy(std::shared_ptr<Writer> writer, const std::shared_ptr<Batch>& batch) {
  const GpuSlice& slice = gpu()->launch(std::move(writer), batch);
  ++copies_out_;
  ++posted_;
  ++stats().gpu_slices;
  stats().gpu_bytes += slice.nbytes;
  return slice;
}

void Link::slice_done(const GpuSlice& slice) {
  --copies_out_;
  slice.writer->slice_done(slice);
  schedule(slice.writer);
}

void Link::tell(EventKind kind, std::uint64_t key, int status, std::string payload) {
  reactor_.events().push({kind, id_, key, status, std::move(payload)});
}

}  // namespace kvrail

// SPDX-License-Identifier: Apache-2.0
// What Python holds: each handle holds its parents, and closes what it names when it is dropped.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "cuda_host_copy.h"
#include "cuda_memory.h"
#include "cuda_sums.h"
#include "link.h"
#include "memory.h"
#include "reactor.h"
#include "writer.h"

namespace kvrail {

namespace nb = nanobind;

using Indices = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline Nanos seconds(double value) {
  if (!(value >= 0)) throw nb::value_error("a duration must not be negative");
  // A century stands for "no limit".
  return static_cast<Nanos>(std::min(value, 3.0e9) * 1e9);
}

inline std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
inline nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

struct PyRegion {
  std::shared_ptr<Context> context;
  std::shared_ptr<Region> region;
};

// What every pool, fence and reactor of one GPU shares.
struct PyCudaDevice {
  explicit PyCudaDevice(int ordinal) : device(std::make_shared<CudaDevice>(ordinal)) {}
  // Made on first use: it takes some of the GPU's memory.
  CudaSums& sums() {
    std::lock_guard lock(mutex);
    if (!summing) summing = std::make_unique<CudaSums>(device);
    return *summing;
  }
  const std::shared_ptr<CudaDevice> device;
  std::mutex mutex;
  std::unique_ptr<CudaSums> summing;
};

// Apart from Python's own object: the reactor's thread drops its fences without the GIL.
struct PyFence {
  std::shared_ptr<CudaFence> fence;
};

struct PyReactor {
  std::shared_ptr<Reactor> reactor;
};

struct PyLink {
  PyLink(std::shared_ptr<Reactor> reactor, std::shared_ptr<Link> link)
      : reactor(std::move(reactor)), link(std::move(link)) {}
  ~PyLink() {
    // The last reference may end the reactor's thread, which never needs the GIL, but may take a moment.
    nb::gil_scoped_release release;
    link->close();
    link.reset();
    reactor.reset();
  }
  std::shared_ptr<Reactor> reactor;
  std::shared_ptr<Link> link;
};

inline Way way_named(const std::string& name) {
  constexpr std::pair<const char*, Way> kWays[] = {{"", Way::best},         {"put", Way::put},
                                                   {"shm", Way::shm},       {"stream", Way::stream},
                                                   {"engine", Way::engine}, {"kernel", Way::kernel}};
  for (const auto& [known, way] : kWays)
    if (name == known) return way;
  throw nb::value_error("push: way is kernel, engine, shm, stream or put, or empty for the best");
}

class PyWriter {
 public:
  PyWriter(std::shared_ptr<PyLink> link, std::shared_ptr<Writer> writer)
      : link_(std::move(link)), writer_(std::move(writer)) {}
  ~PyWriter() {
    if (!stopped_) link_->link->on_writer_light(writer_, [](Writer& writer) { writer.abandon(); });
  }
  PyWriter(const PyWriter&) = delete;
  PyWriter& operator=(const PyWriter&) = delete;

  const Writer& writer() const { return *writer_; }
  void renew(double ttl_s) { writer_->renew(seconds(ttl_s)); }

  void push(std::uint32_t pool, std::uint64_t source, const Indices& sources, const Indices& targets,
            const PyFence* after, const std::string& way, std::uint32_t rail,
            std::optional<std::pair<std::uint64_t, std::uint64_t>> part) {
    if (part && part->second == 0) throw nb::value_error("push: a part has bytes");
    const Part pushed = part ? Part{part->first, part->second} : Part{};
    if (sources.size() != targets.size()) throw nb::value_error("push: as many source as target units are needed");
    if (rung_) throw nb::value_error("push: the doorbell was already ordered");
    if (stopped_) return;
    const Way wished = way_named(way);
    const std::shared_ptr<CudaFence> fence = after != nullptr ? after->fence : nullptr;
    // In pieces: while the indices of one are copied here, the one before it is on its way; a small one first, so that
    // something is soon. An empty list is a piece.
    std::size_t first = 0, piece = kFirstPieceUnits;
    do {
      const std::size_t end = std::min(sources.size(), first + piece);
      using List = std::vector<std::uint32_t>;
      auto batch = std::make_shared<Batch>(pool, source, List(sources.data() + first, sources.data() + end),
                                           List(targets.data() + first, targets.data() + end), pushed, wished, fence,
                                           end == sources.size(), rail);
      link_->link->on_writer_light(writer_, [batch = std::move(batch)](Writer& writer) { writer.add(batch); },
                                   {pool, sources.size(), wished});
      first = end;
      piece = std::min(4 * piece, kPieceUnits);
    } while (first < sources.size());
  }

  void ring(const nb::bytes& message) {
    if (rung_) throw nb::value_error("ring: the doorbell was already ordered");
    rung_ = true;
    link_->link->on_writer_light(writer_, [message = to_string(message)](Writer& writer) { writer.ring(message); });
  }

  void stop() {
    if (std::exchange(stopped_, true)) return;
    writer_->forbid();
    act([](Writer& writer) { writer.stop(); });
  }

 private:
  // As many as the longest slice of a copy.
  static constexpr std::size_t kPieceUnits = 32768, kFirstPieceUnits = 2048;

  void act(std::function<void(Writer&)> what) { link_->link->on_writer(writer_, std::move(what)); }

  const std::shared_ptr<PyLink> link_;
  const std::shared_ptr<Writer> writer_;
  bool rung_ = false, stopped_ = false;
};

// Reactors that are still running when the interpreter ends are closed before UCX's own destructors run.
class Running {
 public:
  void add(const std::shared_ptr<Reactor>& reactor) {
    std::lock_guard lock(mutex_);
    std::erase_if(reactors_, [](const auto& each) { return each.expired(); });
    reactors_.push_back(reactor);
  }
  void close_all() {
    std::vector<std::weak_ptr<Reactor>> reactors;
    {
      std::lock_guard lock(mutex_);
      reactors.swap(reactors_);
    }
    for (const auto& each : reactors)
      if (auto reactor = each.lock()) reactor->close();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<Reactor>> reactors_;
};

inline Running& running() {
  static Running running;
  return running;
}

}  // namespace kvrail

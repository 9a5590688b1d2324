// SPDX-License-Identifier: Apache-2.0
// The names that Python sees (transfer/_ucx.pyi). Handles hold their parents; the GIL is released wherever a
// call may wait or touch much memory.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <system_error>

#include "checksum.h"
#include "handles.h"
#include "interfaces.h"
#include "module_cuda.h"
#include "process.h"
#include "status.h"
#include "stream_copy.h"

using namespace nanobind::literals;

namespace kvrail {
namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

std::shared_ptr<Pool> make_pool(std::uint64_t nbytes, std::uint64_t unit_bytes) {
  if (unit_bytes == 0 || nbytes == 0 || nbytes % unit_bytes != 0)
    throw nb::value_error("a pool holds a whole number of units");
  auto pool = std::make_shared<Pool>();
  pool->units = nbytes / unit_bytes;
  pool->unit_bytes = unit_bytes;
  return pool;
}

nb::list drain(PyReactor& self) {
  nb::list events;
  for (const Event& event : self.reactor->events().drain())
    events.append(
        nb::make_tuple(static_cast<int>(event.kind), event.link, event.key, event.status, to_bytes(event.payload)));
  return events;
}

StreamSecret secret_of(const nb::bytes& bytes) {
  StreamSecret secret;
  if (bytes.size() != secret.size()) throw nb::value_error("the secret of a stream is 32 bytes");
  std::copy_n(bytes.c_str(), secret.size(), secret.begin());
  return secret;
}

// (id, base, nbytes, unit_bytes)
using Offered = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t>;

StreamReader::Targets targets_of(const std::vector<Offered>& pools) {
  StreamReader::Targets targets;
  for (const auto& [id, base, nbytes, unit_bytes] : pools) {
    make_pool(nbytes, unit_bytes);
    targets[id] = {base, nbytes, unit_bytes};
  }
  return targets;
}

nb::dict stats(PyReactor& self) {
  const Stats& stats = self.reactor->stats();
  nb::dict counts;
  auto put = [&](const char* name, const Stats::Count& count) { counts[name] = count.load(); };
  put("turns", stats.turns);
  put("sleeps", stats.sleeps);
  put("commands", stats.commands);
  put("light_turns", stats.light_turns);
  put("messages_sent", stats.messages_sent);
  put("messages_received", stats.messages_received);
  put("messages_early", stats.messages_early);
  put("messages_duplicate", stats.messages_duplicate);
  put("messages_wrong_link", stats.messages_wrong_link);
  put("puts", stats.puts);
  put("put_bytes", stats.put_bytes);
  put("rail_puts", stats.rail_puts);
  put("copies", stats.copies);
  put("copied_bytes", stats.copied_bytes);
  put("gpu_slices", stats.gpu_slices);
  put("gpu_bytes", stats.gpu_bytes);
  put("gpu_ns", stats.gpu_ns);
  put("stream_frames", stats.stream_frames);
  put("stream_bytes", stats.stream_bytes);
  put("stream_frames_received", stats.stream_frames_received);
  put("stream_bytes_received", stats.stream_bytes_received);
  put("stream_strangers", stats.stream_strangers);
  return counts;
}

nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>> checksum_pages(std::uint64_t base, std::uint64_t page_bytes,
                                                                  const Indices& pages) {
  if (page_bytes == 0 || page_bytes % 8 != 0) throw nb::value_error("page_bytes must be a multiple of 8");
  auto* sums = new std::uint64_t[pages.size()];
  nb::capsule owner(sums, [](void* data) noexcept { delete[] static_cast<std::uint64_t*>(data); });
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < pages.size(); ++i)
      sums[i] = checksum(reinterpret_cast<const void*>(base + pages.data()[i] * page_bytes), page_bytes);
  }
  return {sums, {pages.size()}, owner};
}

PyReactor make_reactor(std::shared_ptr<Context> context, long spin_us, int copy_threads, PyCudaDevice* cuda) {
  if (spin_us < 0 || copy_threads < 0 || copy_threads > 64)
    throw nb::value_error("spin_us must not be negative, copy_threads be 0 to 64");
  auto reactor = std::make_shared<Reactor>(std::move(context), spin_us * kMicro, static_cast<unsigned>(copy_threads),
                                           cuda != nullptr ? cuda->device : nullptr);
  running().add(reactor);
  return {std::move(reactor)};
}

}  // namespace
}  // namespace kvrail

NB_MODULE(_ucx, m) {
  using namespace kvrail;
  // Handles that live until the interpreter ends are no leak worth a warning on stderr.
  nb::set_leak_warnings(false);
  tame_ucx();
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { running().close_all(); }, ReleaseGil()));

  // The module lives as long as the interpreter, and so does this reference.
  static PyObject* ucx_error =
      nb::object(nb::module_::import_("kvrail.transfer.errors").attr("UcxFailed")).release().ptr();
  m.attr("UcxError") = nb::handle(ucx_error);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const UcxError& error) {
      nb::object args = nb::make_tuple(error.call, static_cast<int>(error.status), error.text);
      PyErr_SetObject(ucx_error, args.ptr());
    } catch (const std::system_error& error) {
      nb::object args = nb::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });

  bind_cuda(m);

  m.attr("EVENT_MESSAGE") = static_cast<int>(EventKind::message);
  m.attr("EVENT_CONTROL") = static_cast<int>(EventKind::control);
  m.attr("EVENT_LINK_ERROR") = static_cast<int>(EventKind::link_error);
  m.attr("EVENT_FENCED") = static_cast<int>(EventKind::fenced);
  m.attr("EVENT_FLUSHED") = static_cast<int>(EventKind::flushed);
  m.attr("EVENT_PROGRESS") = static_cast<int>(EventKind::progress);
  m.attr("EVENT_RUNG") = static_cast<int>(EventKind::rung);
  m.attr("EVENT_QUIET") = static_cast<int>(EventKind::quiet);
  m.attr("EVENT_FAILED") = static_cast<int>(EventKind::failed);

  m.def("library_version", [] {
    unsigned major, minor, release;
    ucp_get_version(&major, &minor, &release);
    return nb::make_tuple(major, minor, release);
  });
  m.def("interfaces", &interfaces);
  m.def("copy_kind", [] { return stream_copy_kind(); });
  m.def("checksum_pages", &checksum_pages, "base"_a, "page_bytes"_a, "pages"_a.noconvert());

  nb::class_<Context>(m, "Context")
      .def(nb::init<const std::map<std::string, std::string>&>(), "settings"_a, ReleaseGil())
      .def(
          "register",
          [](std::shared_ptr<Context> self, std::uint64_t address, std::uint64_t nbytes, const std::string& memory) {
            auto region = self->add_region(address, nbytes, memory);
            return PyRegion{std::move(self), std::move(region)};
          },
          "address"_a, "nbytes"_a, "memory"_a = "host", ReleaseGil())
      .def("transports", &Context::transports, ReleaseGil())
      .def("describe", &Context::describe, ReleaseGil())
      .def("close", &Context::close, ReleaseGil());

  nb::class_<PyRegion>(m, "Region")
      .def_prop_ro("address", [](const PyRegion& self) { return self.region->address(); })
      .def_prop_ro("nbytes", [](const PyRegion& self) { return self.region->nbytes(); })
      .def_prop_ro("memory", [](const PyRegion& self) { return self.region->memory(); })
      .def("packed_key", [](const PyRegion& self) { return to_bytes(self.region->packed_key()); })
      .def("close", [](PyRegion& self) { self.context->remove_region(self.region); }, ReleaseGil());

  nb::class_<PyReactor>(m, "Reactor")
      .def(
          "__init__",
          [](PyReactor* self, std::shared_ptr<Context> context, long spin_us, int copy_threads, PyCudaDevice* cuda) {
            new (self) PyReactor(make_reactor(std::move(context), spin_us, copy_threads, cuda));
          },
          "context"_a, nb::kw_only(), "spin_us"_a = 0, "copy_threads"_a = 1, "cuda"_a.none() = nb::none())
      .def_prop_ro("event_fd", [](const PyReactor& self) { return self.reactor->events().fd(); })
      .def(
          "open_link",
          [](PyReactor& self, std::uint32_t epoch, std::uint64_t cookie) {
            return std::make_shared<PyLink>(self.reactor, self.reactor->open_link(epoch, cookie));
          },
          nb::kw_only(), "epoch"_a, "cookie"_a, ReleaseGil())
      .def("drain", &drain)
      .def("stats", &stats)
      .def("close", [](PyReactor& self) { self.reactor->close(); }, ReleaseGil());

  nb::class_<PyLink>(m, "Link")
      .def_prop_ro("id", [](const PyLink& self) { return self.link->id(); })
      .def_prop_ro("epoch", [](const PyLink& self) { return self.link->epoch(); })
      .def(
          "address", [](const PyLink& self, bool network_only) { return to_bytes(self.link->address(network_only)); },
          nb::kw_only(), "network_only"_a = false)
      .def(
          "connect", [](PyLink& self, const nb::bytes& peer) { self.link->connect(to_string(peer)); }, "peer_address"_a)
      .def(
          "open_rails",
          [](PyLink& self, unsigned count) {
            if (count < 1 || count > Link::kMostRails) throw nb::value_error("open_rails: one to sixteen");
            // UCX needs a context that is current on the thread, as soon as it knows of a GPU.
            if (count > 1 && self.reactor->cuda()) throw nb::value_error("open_rails: not beside a CUDA device");
            self.link->open_rails(count);
          },
          "count"_a)
      .def(
          "transports", [](PyLink& self) { return self.link->transports(); }, ReleaseGil())
      .def(
          "describe", [](PyLink& self) { return self.link->describe(); }, ReleaseGil())
      .def(
          "import_put",
          [](PyLink& self, std::uint32_t id, std::uint64_t base, std::uint64_t nbytes, std::uint64_t unit_bytes,
             const nb::bytes& key) {
            if (key.size() == 0) throw nb::value_error("import_put: the key is empty");
            auto pool = make_pool(nbytes, unit_bytes);
            pool->base = base;
            pool->last = Way::put;
            self.link->import_pool(id, std::move(pool), to_string(key));
          },
          "pool"_a, nb::kw_only(), "base"_a, "nbytes"_a, "unit_bytes"_a, "key"_a)
      .def(
          "import_shm",
          [](PyLink& self, std::uint32_t id, int fd, std::uint64_t offset, std::uint64_t nbytes,
             std::uint64_t unit_bytes) {
            auto pool = make_pool(nbytes, unit_bytes);
            pool->mapping = std::make_shared<Mapping>(fd, offset, nbytes);
            pool->last = Way::shm;
            self.link->import_pool(id, std::move(pool), {});
          },
          "pool"_a, nb::kw_only(), "fd"_a, "offset"_a, "nbytes"_a, "unit_bytes"_a, ReleaseGil())
      .def(
          "import_peer",
          [](PyLink& self, std::uint32_t id, const nb::bytes& handle, std::uint64_t offset, std::uint64_t nbytes,
             std::uint64_t unit_bytes) {
            auto pool = make_pool(nbytes, unit_bytes);
            std::string opened = to_string(handle);
            nb::gil_scoped_release release;
            const auto& cuda = self.reactor->cuda();
            if (!cuda) throw std::invalid_argument("import_peer: the reactor was opened without a CUDA device");
            pool->peer = std::make_shared<PeerMemory>(cuda, std::move(opened), offset, nbytes);
            pool->kernel = cuda->kernels().copy != nullptr && unit_bytes % 16 == 0 && offset % 16 == 0;
            self.link->import_pool(id, std::move(pool), {});
          },
          "pool"_a, nb::kw_only(), "handle"_a, "offset"_a, "nbytes"_a, "unit_bytes"_a)
      .def(
          "import_stream",
          [](PyLink& self, std::uint32_t id, std::uint64_t nbytes, std::uint64_t unit_bytes) {
            auto pool = make_pool(nbytes, unit_bytes);
            pool->stream = true;
            pool->last = Way::stream;
            self.link->import_pool(id, std::move(pool), {});
          },
          "pool"_a, nb::kw_only(), "nbytes"_a, "unit_bytes"_a)
      .def(
          "read_stream",
          [](PyLink& self, int fd, const nb::bytes& secret, const std::vector<Offered>& pools) {
            Fd listener(fd, "read_stream");
            self.link->read_stream(std::move(listener), secret_of(secret), targets_of(pools));
          },
          "fd"_a, nb::kw_only(), "secret"_a, "pools"_a)
      .def(
          "write_stream",
          [](PyLink& self, int fd, const nb::bytes& secret) {
            Fd connection(fd, "write_stream");
            self.link->write_stream(std::move(connection), secret_of(secret));
          },
          "fd"_a, nb::kw_only(), "secret"_a)
      .def(
          "settle_stream", [](PyLink& self, bool used) { self.link->settle_stream(used); }, "used"_a)
      .def(
          "attach_control",
          [](PyLink& self, int fd, int interval_ms) {
            if (interval_ms < 1) throw nb::value_error("attach_control: interval_ms must be positive");
            self.link->attach_control(fd, interval_ms * kMilli);
          },
          "fd"_a, "interval_ms"_a)
      .def(
          "set_beat",
          [](PyLink& self, const nb::bytes& payload) {
            if (payload.size() > Control::kMaxBeat) throw nb::value_error("set_beat: the payload is too long");
            self.link->set_beat(to_string(payload));
          },
          "payload"_a)
      .def("peer_beat",
           [](const PyLink& self) {
             auto [age, payload, unread] = self.link->peer_beat();
             return nb::make_tuple(age < 0 ? INFINITY : static_cast<double>(age) * 1e-9, to_bytes(payload), unread);
           })
      .def(
          "send", [](PyLink& self, const nb::bytes& message) { self.link->send(to_string(message)); }, "message"_a)
      .def(
          "flush", [](PyLink& self, std::uint64_t token) { self.link->flush(token); }, "token"_a)
      .def(
          "writer",
          [](std::shared_ptr<PyLink> self, std::uint64_t key, double ttl_s) {
            auto writer = self->link->open_writer(key, seconds(ttl_s));
            return std::make_shared<PyWriter>(std::move(self), std::move(writer));
          },
          "key"_a, nb::kw_only(), "ttl_s"_a)
      .def("fence", [](PyLink& self) { self.link->fence(); })
      .def("close", [](PyLink& self) { self.link->close(); });

  nb::class_<PyWriter>(m, "Writer")
      .def_prop_ro("key", [](const PyWriter& self) { return self.writer().key(); })
      .def_prop_ro("posted", [](const PyWriter& self) { return self.writer().posted(); })
      .def_prop_ro("done", [](const PyWriter& self) { return self.writer().done(); })
      .def_prop_ro("failed", [](const PyWriter& self) { return self.writer().failed(); })
      .def("push", &PyWriter::push, "pool"_a, "source"_a, "source_units"_a.noconvert(), "target_units"_a.noconvert(),
           nb::kw_only(), "after"_a.none() = nb::none(), "way"_a = "", "rail"_a = 0, "part"_a.none() = nb::none())
      .def("renew", &PyWriter::renew, "ttl_s"_a)
      .def("ring", &PyWriter::ring, "message"_a)
      .def("stop", &PyWriter::stop);
}

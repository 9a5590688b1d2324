// SPDX-License-Identifier: Apache-2.0
#include "module_cuda.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "handles.h"

using namespace nanobind::literals;

namespace kvrail {
namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>> checksum_pages(PyCudaDevice& self, std::uint64_t base,
                                                                  std::uint64_t page_bytes, const Indices& pages,
                                                                  const PyFence* after) {
  if (page_bytes == 0 || page_bytes % 16 != 0 || base % 16 != 0)
    throw nb::value_error("checksum_pages: page_bytes and base must be multiples of 16");
  auto* sums = new std::uint64_t[pages.size()];
  nb::capsule owner(sums, [](void* data) noexcept { delete[] static_cast<std::uint64_t*>(data); });
  {
    nb::gil_scoped_release release;
    self.sums().sum(base, page_bytes, pages.data(), pages.size(), after != nullptr ? after->fence.get() : nullptr,
                    sums);
  }
  return {sums, {pages.size()}, owner};
}

nb::bytes read(const DeviceMemory& self, std::uint64_t offset, std::uint64_t nbytes) {
  if (offset > self.nbytes() || nbytes > self.nbytes() - offset) throw nb::value_error("outside the GPU memory");
  std::string bytes(nbytes, '\0');
  {
    nb::gil_scoped_release release;
    self.read(offset, bytes.data(), nbytes);
  }
  return to_bytes(bytes);
}

void write(DeviceMemory& self, std::uint64_t offset, const nb::bytes& content) {
  const char* data = content.c_str();
  const std::size_t nbytes = content.size();
  nb::gil_scoped_release release;
  self.write(offset, data, nbytes);
}

HostWay host_way_named(const std::string& name) {
  if (name.empty()) return HostWay::best;
  if (name == "kernel") return HostWay::kernel;
  if (name == "engine") return HostWay::engine;
  throw nb::value_error("copy: way is kernel or engine, or empty for the better one");
}

HostCopy copy(HostCopies& self, const Addresses& sources, const Addresses& targets, std::uint64_t nbytes,
              const PyFence* after, const std::string& way) {
  if (sources.size() != targets.size()) throw nb::value_error("copy: as many sources as targets are needed");
  const CudaFence* fence = after != nullptr ? after->fence.get() : nullptr;
  const HostWay wished = host_way_named(way);
  // Where lists are many it waits for one to be over.
  nb::gil_scoped_release release;
  return self.copy({sources.data(), sources.size()}, {targets.data(), targets.size()}, nbytes, fence, wished);
}

CuStream stream_at(std::uint64_t address) { return reinterpret_cast<CuStream>(address); }

}  // namespace

void bind_cuda(nb::module_& m) {
  // The module lives as long as the interpreter, and so does this reference.
  static PyObject* cuda_error =
      nb::object(nb::module_::import_("kvrail.transfer.errors").attr("CudaFailed")).release().ptr();
  m.attr("CudaError") = nb::handle(cuda_error);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const CudaError& error) {
      nb::object args = nb::make_tuple(error.call, error.status, error.text);
      PyErr_SetObject(cuda_error, args.ptr());
    }
  });

  nb::class_<PyFence>(m, "CudaFence")
      .def("done", [](const PyFence& self) { return self.fence->event.done(); })
      .def("wait", [](const PyFence& self) { self.fence->event.wait(); }, ReleaseGil());

  nb::class_<DeviceMemory>(m, "DeviceMemory")
      .def_prop_ro("address", &DeviceMemory::address)
      .def_prop_ro("nbytes", &DeviceMemory::nbytes)
      .def("ipc_handle", [](const DeviceMemory& self) { return to_bytes(self.ipc_handle()); })
      .def("read", &read, "offset"_a, "nbytes"_a)
      .def("write", &write, "offset"_a, "content"_a)
      .def("close", &DeviceMemory::close, ReleaseGil())
      .def("leave_open", &DeviceMemory::leave_open);

  nb::class_<PinnedMemory>(m, "PinnedMemory")
      .def_prop_ro("address", &PinnedMemory::address)
      .def_prop_ro("nbytes", &PinnedMemory::nbytes)
      .def("close", &PinnedMemory::close, ReleaseGil());

  nb::class_<PyCudaDevice>(m, "CudaDevice")
      .def(nb::init<int>(), "ordinal"_a, ReleaseGil())
      .def_prop_ro("ordinal", [](const PyCudaDevice& self) { return self.device->ordinal(); })
      .def_prop_ro("uuid", [](const PyCudaDevice& self) { return to_bytes(self.device->uuid()); })
      .def_prop_ro("name", [](const PyCudaDevice& self) { return self.device->name(); })
      .def_prop_ro("multiprocessors", [](const PyCudaDevice& self) { return self.device->multiprocessors(); })
      .def_prop_ro("shared_by_mps", [](const PyCudaDevice& self) { return self.device->shared_by_mps(); })
      .def(
          "flush_remote_writes", [](const PyCudaDevice& self) { self.device->flush_remote_writes(); }, ReleaseGil())
      .def("make_current", [](const PyCudaDevice& self) { self.device->make_current(); })
      .def(
          "allocate",
          [](PyCudaDevice& self, std::uint64_t nbytes) {
            if (nbytes == 0) throw std::invalid_argument("allocate: an empty range");
            return std::make_shared<DeviceMemory>(self.device, nbytes);
          },
          "nbytes"_a, ReleaseGil())
      .def(
          "pin",
          [](PyCudaDevice& self, std::uint64_t address, std::uint64_t nbytes) {
            if (address == 0 || nbytes == 0) throw std::invalid_argument("pin: an empty range");
            return std::make_shared<PinnedMemory>(self.device, address, nbytes);
          },
          "address"_a, "nbytes"_a, ReleaseGil())
      .def(
          "export_memory",
          [](const PyCudaDevice& self, std::uint64_t address) {
            const ExportedMemory exported = export_memory(*self.device, address);
            return nb::make_tuple(to_bytes(exported.handle), exported.offset);
          },
          "address"_a)
      .def(
          "record",
          [](PyCudaDevice& self, std::uint64_t stream) { return PyFence{self.device->record(stream_at(stream))}; },
          "stream"_a)
      .def(
          "hold",
          [](const PyCudaDevice& self, std::uint64_t stream, const PyFence& fence) {
            self.device->hold(stream_at(stream), *fence.fence);
          },
          "stream"_a, "fence"_a)
      .def(
          "copy",
          [](const PyCudaDevice& self, std::uint64_t source, std::uint64_t target, std::uint64_t nbytes,
             std::uint64_t stream) { self.device->copy(target, source, nbytes, stream_at(stream)); },
          "source"_a, "target"_a, "nbytes"_a, "stream"_a)
      .def(
          "load_kernels",
          [](PyCudaDevice& self, const nb::bytes& cubin) {
            std::string code = to_string(cubin);
            nb::gil_scoped_release release;
            self.device->load_kernels(code);
          },
          "cubin"_a)
      .def("checksum_pages", &checksum_pages, "base"_a, "page_bytes"_a, "pages"_a.noconvert(),
           "after"_a.none() = nb::none());

  nb::class_<HostCopy>(m, "HostCopy")
      .def_prop_ro("fence", [](const HostCopy& self) { return PyFence{self.ended}; })
      .def("done", [](const HostCopy& self) { return self.ended->event.done(); })
      .def("seconds", &HostCopy::seconds);

  nb::class_<HostCopies>(m, "HostCopies")
      .def(
          "__init__",
          [](HostCopies* self, const PyCudaDevice& device, bool to_host) {
            nb::gil_scoped_release release;
            new (self) HostCopies(device.device, to_host);
          },
          "device"_a, nb::kw_only(), "to_host"_a)
      .def("copy", &copy, "sources"_a.noconvert(), "targets"_a.noconvert(), "nbytes"_a, nb::kw_only(),
           "after"_a.none() = nb::none(), "way"_a = "")
      .def("record", [](const HostCopies& self) { return PyFence{self.record()}; })
      .def("wait", &HostCopies::wait, ReleaseGil());
}

}  // namespace kvrail

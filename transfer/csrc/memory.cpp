// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <array>
#include <utility>

#include "status.h"

namespace kvrail {
namespace {

struct Kind {
  const char* name;
  ucs_memory_type_t type;
};
constexpr std::array kKinds{Kind{"host", UCS_MEMORY_TYPE_HOST}, Kind{"cuda", UCS_MEMORY_TYPE_CUDA},
                            Kind{"cuda-managed", UCS_MEMORY_TYPE_CUDA_MANAGED}, Kind{"rocm", UCS_MEMORY_TYPE_ROCM}};

ucs_memory_type_t kind_named(const std::string& name) {
  for (const Kind& kind : kKinds)
    if (name == kind.name) return kind.type;
  throw UcxError("register", UCS_ERR_INVALID_PARAM, "unknown kind of memory '" + name + "'");
}

std::string name_of(ucs_memory_type_t type) {
  for (const Kind& kind : kKinds)
    if (type == kind.type) return kind.name;
  return "memory type " + std::to_string(static_cast<int>(type));
}

}  // namespace

Region::Region(ucp_context_h context, std::uint64_t address, std::uint64_t nbytes, const std::string& memory)
    : context_(context), address_(address), nbytes_(nbytes), memory_(memory), kind_(kind_named(memory)) {
  if (address == 0 || nbytes == 0)
    throw UcxError("register", UCS_ERR_INVALID_PARAM, "an empty range cannot be registered");
  ucp_mem_map_params_t params{};
  // The memory type is left to UCX, so that what it found can be compared with what the caller believes.
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = reinterpret_cast<void*>(address);
  params.length = nbytes;
  check(ucp_mem_map(context_, &params, &handle_), "ucp_mem_map");
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_MEM_TYPE;
  ucs_status_t status = ucp_mem_query(handle_, &attributes);
  if (status == UCS_OK && attributes.mem_type == kind_) return;
  unmap();
  check(status, "ucp_mem_query");
  throw UcxError("register", UCS_ERR_UNSUPPORTED,
                 "UCX sees " + name_of(attributes.mem_type) + " memory where " + memory +
                     " was announced (is UCX built without support for that device?)");
}

std::string Region::packed_key() const {
  if (handle_ == nullptr) throw UcxError("packed_key", UCS_ERR_INVALID_PARAM, "the region is closed");
  void* buffer;
  std::size_t size;
  // ucp_memh_pack is documented as its successor, and aborts the process: "unsupported".
  check(ucp_rkey_pack(context_, handle_, &buffer, &size), "ucp_rkey_pack");
  std::string key(static_cast<const char*>(buffer), size);
  ucp_rkey_buffer_release(buffer);
  return key;
}

void Region::unmap() {
  if (handle_ != nullptr) ucp_mem_unmap(context_, std::exchange(handle_, nullptr));
}

}  // namespace kvrail

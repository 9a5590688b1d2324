// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <ucs/config/parser.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <sstream>
#include <utility>

#include "capture.h"
#include "memory.h"
#include "status.h"

// Absent from some UCX versions: then a misspelt transport setting is only warned about by UCX itself.
extern "C" int ucs_config_global_list_has_field(const char* name) __attribute__((weak));

namespace kvrail {
namespace {

// UCX 1.20 is the first with zero-copy puts in peer error mode (the inline ucp_init would demand the version
// that this file was compiled with).
constexpr unsigned kOldestMinor = 20;

}  // namespace

Context::Context(const std::map<std::string, std::string>& settings) {
  ucp_config_t* config;
  check(ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> owned(config, ucp_config_release);
  for (const auto& [key, value] : settings) {
    if (ucs_status_t status = ucp_config_modify(config, key.c_str(), value.c_str()); status != UCS_OK)
      throw UcxError("ucp_config_modify", status,
                     "setting " + key + "=" + value + " refused: " + ucs_status_string(status));
  }
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  // Memory is registered by Python's thread while the reactor's thread posts.
  params.mt_workers_shared = 1;
  params.name = "kvrail";
  check(ucp_init_version(UCP_API_MAJOR, kOldestMinor, &params, config, &handle_), "ucp_init");
  // ucp_config_modify takes any name, in the hope that a transport knows it; transports are loaded only now.
  if (ucs_config_global_list_has_field != nullptr) {
    for (const auto& [key, value] : settings) {
      if (ucs_config_global_list_has_field(key.c_str())) continue;
      ucp_cleanup(std::exchange(handle_, nullptr));
      throw UcxError("ucp_config_modify", UCS_ERR_NO_ELEM, "UCX knows no setting UCX_" + key);
    }
  }
}

Context::~Context() {
  // No link can live here: each holds its reactor, and that holds us.
  for (const auto& region : regions_) region->unmap();
  if (handle_ != nullptr) ucp_cleanup(handle_);
}

void Context::require_open(const char* call) const {
  if (handle_ == nullptr) throw UcxError(call, UCS_ERR_INVALID_PARAM, "the context is closed");
}

std::shared_ptr<Region> Context::add_region(std::uint64_t address, std::uint64_t nbytes, const std::string& memory) {
  require_open("register");
  auto region = std::make_shared<Region>(handle_, address, nbytes, memory);
  std::lock_guard lock(mutex_);
  regions_.push_back(region);
  return region;
}

std::shared_ptr<Region> Context::find_region(std::uint64_t address, std::uint64_t nbytes) const {
  std::lock_guard lock(mutex_);
  for (const auto& region : regions_)
    if (region->contains(address, nbytes)) return region;
  return nullptr;
}

void Context::remove_region(const std::shared_ptr<Region>& region) {
  {
    std::lock_guard lock(mutex_);
    if (std::find(regions_.begin(), regions_.end(), region) == regions_.end()) return;
  }
  require_no_links("Region.close");
  std::lock_guard lock(mutex_);
  std::erase(regions_, region);
  region->unmap();
}

std::vector<std::string> Context::transports() const {
  require_open("transports");
  // UCP has no query for this; its own listing has one line "#   resource 3 : md 1 dev 2 flags -- tcp/lo"
  // each.
  std::istringstream lines(describe());
  std::set<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    if (line.find("resource ") == std::string::npos) continue;
    if (auto space = line.find_last_of(' '); space != std::string::npos) names.insert(line.substr(space + 1));
  }
  return {names.begin(), names.end()};
}

std::string Context::describe() const {
  require_open("describe");
  return captured([this](FILE* stream) { ucp_context_print_info(handle_, stream); });
}

void Context::close() {
  if (handle_ == nullptr) return;
  require_no_links("Context.close");
  std::vector<std::shared_ptr<Region>> regions;
  {
    std::lock_guard lock(mutex_);
    regions.swap(regions_);
  }
  for (const auto& region : regions) region->unmap();
  ucp_cleanup(std::exchange(handle_, nullptr));
}

void Context::link_opened() {
  std::lock_guard lock(mutex_);
  ++open_links_;
}

void Context::link_closing() {
  std::lock_guard lock(mutex_);
  --open_links_;
  ++closing_links_;
}

void Context::link_closed(bool was_closing) {
  {
    std::lock_guard lock(mutex_);
    --(was_closing ? closing_links_ : open_links_);
  }
  changed_.notify_all();
}

void Context::require_no_links(const char* call) {
  std::unique_lock lock(mutex_);
  if (open_links_ == 0) changed_.wait_for(lock, std::chrono::seconds(5), [this] { return closing_links_ == 0; });
  if (open_links_ + closing_links_ != 0)
    throw UcxError(call, UCS_ERR_BUSY,
                   std::to_string(open_links_ + closing_links_) + " links still live: close them first");
}

}  // namespace kvrail

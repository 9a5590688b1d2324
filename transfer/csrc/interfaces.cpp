// SPDX-License-Identifier: Apache-2.0
#include "interfaces.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <system_error>

namespace kvrail {

std::vector<std::pair<std::string, std::string>> interfaces() {
  ifaddrs* first;
  if (getifaddrs(&first) < 0) throw std::system_error(errno, std::generic_category(), "getifaddrs");
  std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(first, freeifaddrs);
  std::vector<std::pair<std::string, std::string>> found;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST];
    if (getnameinfo(each->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      found.emplace_back(each->ifa_name, text);
  }
  return found;
}

}  // namespace kvrail

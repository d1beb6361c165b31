#include "tessera/mesh/backends/own_address.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tessera {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList addresses_of(const std::string& name) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), "9", &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

std::string text_of(const sockaddr& address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int failed = getnameinfo(&address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return failed == 0 ? text.data() : "";
}

// Says whether an address is one that means each host itself.
bool is_here(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

bool is_of_loopback(const sockaddr& address) {
  if (address.sa_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  }
  return ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
}

// Says whether the first of its own name's addresses to which this host can bind, which Gloo takes, is one of a
// network.
bool own_name_is_on_a_network() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return false;
  const AddressList addresses = addresses_of(name.data());
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_storage any_port{};
    std::copy_n(reinterpret_cast<const char*>(each->ai_addr), each->ai_addrlen, reinterpret_cast<char*>(&any_port));
    reinterpret_cast<sockaddr_in&>(any_port).sin_port = 0;  // at the same place in an IPv6 address
    const bool is_ours = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&any_port), each->ai_addrlen) == 0;
    if (fd >= 0) close(fd);
    if (is_ours) return !is_of_loopback(*each->ai_addr);
  }
  return false;
}

// Returns the address from which this host would send to `there`. Nothing is sent.
std::string address_towards(const std::string& there) {
  const AddressList addresses = addresses_of(there);
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    const int fd = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    const bool known = fd >= 0 && connect(fd, each->ai_addr, each->ai_addrlen) == 0 &&
                       getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    if (fd >= 0) close(fd);
    const auto& address = reinterpret_cast<const sockaddr&>(own);
    if (known && !is_of_loopback(address)) return text_of(address, length);
  }
  return {};
}

std::string address_of_first_interface() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    const bool is_usable = (each->ifa_flags & IFF_LOOPBACK) == 0 && (each->ifa_flags & IFF_RUNNING) != 0;
    if (!is_usable || each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    return text_of(*each->ifa_addr, sizeof(sockaddr_in));
  }
  return {};
}

}  // namespace

std::string own_address(const std::string& meeting_point) {
  if (std::getenv("GLOO_SOCKET_IFNAME") != nullptr || is_here(meeting_point)) return {};
  if (own_name_is_on_a_network()) return {};
  const std::string towards = meeting_point.empty() ? "" : address_towards(meeting_point);
  return towards.empty() ? address_of_first_interface() : towards;
}

}  // namespace tessera

// A library that is preloaded into mpirun (LD_PRELOAD), which has no setting for this: what it opens listens on the
// loopback interface alone. It replaces two functions of the C library, and needs nothing but the C library.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

// mpirun goes on without IPv6, as on a host that has none.
extern "C" int socket(int family, int type, int protocol) noexcept {
  if (family == AF_INET6) {
    errno = EAFNOSUPPORT;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_socket, family, type, protocol));
}

extern "C" int bind(int fd, const sockaddr* address, socklen_t size) noexcept {
  sockaddr_in loopback = {};
  if (size >= sizeof(loopback) && address->sa_family == AF_INET) {
    std::memcpy(&loopback, address, sizeof(loopback));
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address = reinterpret_cast<const sockaddr*>(&loopback);
  }
  return static_cast<int>(::syscall(SYS_bind, fd, address, size));
}

#pragma once

#include <string>

namespace tessera {

// Returns the address at which this host listens for Gloo's connections from other hosts, or "" where Gloo itself
// chooses rightly: the interface that GLOO_SOCKET_IFNAME names, the address of the host's own name, and any where ranks
// meet at a loopback address, since they are all on this host then.
//
// Debian gives the host's own name to 127.0.1.1, and the name may also have no address here at all. No other host could
// connect then. So the address is the one from which this host reaches `meeting_point`, a name or an address, which may
// be empty; where that is this host itself, it is that of the first network interface.
std::string own_address(const std::string& meeting_point);

}  // namespace tessera

#pragma once

#include <sys/types.h>

#include <string>

namespace tessera {

// Starts a process that only leads a process group, and ends what remains of the group when the calling process dies,
// even by SIGKILL. It kills the group, and every process of this user whose environment, as it was at its start, has
// the variable `mark` ("NAME=value"), in whatever session or group that process is. With an empty mark it kills the
// group alone. Returns its pid, which is also the group's id, once the watchdog would see that the caller dies. Throws
// std::runtime_error when no process or pipe can be made, or the watchdog ends at once.
pid_t spawn_watchdog(const std::string& mark);

}  // namespace tessera

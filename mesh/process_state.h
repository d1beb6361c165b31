#pragma once

#include <chrono>
#include <string>

namespace tessera {

// Describes this process to the other ranks of its job, in words without spaces: its id, its start time, text that is
// equal for two processes if they see each other under /proc ("-" where this one cannot see itself there), its host, a
// number that tells the Worlds of one process apart, and the time, by the system's clock. Tests give another folder
// than /proc.
std::string describe_this_process(const std::string& proc = "/proc");

// Returns text such as "process 4711 on host node3" of what describe_this_process() has returned.
std::string named_process(const std::string& description);

// Returns how long ago the process described itself, as far as the clocks of two hosts agree; 0 for another text.
std::chrono::milliseconds age_of(const std::string& description);

// Says whether the process has ended; a zombie has. Returns false where this process cannot tell: the other one is on
// another host or in another PID namespace, /proc is not there or is that of another namespace, or it cannot be read
// for another reason than that there is no such process (no file descriptor is left, say).
bool process_has_ended(const std::string& description, const std::string& proc = "/proc");

// Returns the first line of the file in which a launcher has noted how a rank ended, or "" where there is none. Others
// may be able to put something there, since the file lies beside the store's folder and not in it: what is no plain
// file of this user is not read, and nothing there can make this call wait.
std::string read_note(const std::string& path);

}  // namespace tessera

#pragma once

#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/environment.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Makes the store through which the ranks of `environment` find each other. The first of these that applies is used:
//   TESSERA_STORE=path         a FolderStore (mesh/folder_store.h) at that path, where nothing else may be;
//   MASTER_ADDR, MASTER_PORT   a c10d::TCPStore served by rank 0, or by torchrun's agent if
//                              TORCHELASTIC_USE_AGENT_STORE says so. On one host rank 0 binds the server's socket to
//                              the loopback address itself: the socket that c10d makes listens on every interface,
//                              whatever host it is given;
//   neither, on one host, under a launcher that names the job (Open MPI, MPICH, Slurm)
//                              a FolderStore in a folder of mode 0700 named after the user and the job.
// Keys start with what the launcher calls the job, where it says that, and with the number of the restart: two jobs,
// and a job and its failed attempt, do not read each other's.
//
// Throws std::invalid_argument that names the variables to set when the environment gives none of these, and
// std::runtime_error with the library's own text when the server cannot be started or reached within the timeout.
c10::intrusive_ptr<c10d::Store> make_store(const Environment& environment);

}  // namespace tessera

#pragma once

#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/environment.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Makes the store through which the ranks of `environment` find each other. The first of these that applies is used:
//   TESSERA_STORE=path         a FolderStore (mesh/folder_store.h) at that path, where nothing else may be;
//   one host                   a FolderStore in a folder of mode 0700. Its name follows from the user, the launcher's
//                              identifier of the job (Open MPI, MPICH, Slurm) and MASTER_PORT, one of which is needed.
//                              No port is opened. Where torchrun's agent serves a store, that one is used instead;
//   MASTER_ADDR, MASTER_PORT   a c10d::TCPStore served by rank 0, or by torchrun's agent if
//                              TORCHELASTIC_USE_AGENT_STORE says so. With TESSERA_SECRET or TESSERA_SECRET_FILE its
//                              values are signed (mesh/signed_store.h). At a loopback address rank 0 binds the server's
//                              socket to that address itself: the socket that c10d makes listens on every interface.
// Keys start with what the launcher calls the job, where it says that, and with the number of the restart: two jobs,
// and a job and its failed attempt, do not read each other's.
//
// Throws std::invalid_argument that names the variables to set when the environment gives none of these, and
// std::runtime_error with the library's own text when the server cannot be started or reached within the timeout.
c10::intrusive_ptr<c10d::Store> make_store(const Environment& environment);

}  // namespace tessera

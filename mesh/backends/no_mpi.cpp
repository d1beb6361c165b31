// A build without MPI has this file in place of mpi_group.cpp and mpi_transport.cpp.
#include <stdexcept>

#include "tessera/mesh/backends/backend_group.h"

namespace tessera {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "MPI was requested for CPU tensors, but this build has none; install libopenmpi-dev (tools/setup does), or set "
      "MPI_HOME "
      "to another MPI, and build again without --define=tessera_mpi=false; or use gloo");
}

}  // namespace

std::string_view mpi_flavor() { return ""; }
void skip_mpi_end() noexcept {}
void start_mpi(const GroupRequest&) { refuse(); }
BackendGroup make_mpi_group(const GroupRequest&) { refuse(); }

}  // namespace tessera

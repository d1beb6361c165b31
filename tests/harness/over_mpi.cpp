#include "tessera/tests/harness/over_mpi.h"

#include <cstdlib>
#include <string_view>

#include "tessera/tools/launcher/mpi_job.h"

namespace tessera::testing {

bool is_over_mpi() {
  const char* const backend = std::getenv("TESSERA_BACKEND");
  return backend != nullptr && std::string_view(backend) == "mpi";
}

std::string why_no_mpi() {
#ifdef TESSERA_MPI
  if (has_mpirun()) return "";
  return "mpirun is not installed; tools/setup installs it (Debian's openmpi-bin)";
#else
  return "this build has no MPI; tools/setup installs it (Debian's libopenmpi-dev), and --define=tessera_mpi=false "
         "leaves it out";
#endif
}

}  // namespace tessera::testing

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/environment_variables.h"

namespace tessera {

// Returns a variable's value, or "" where it is not set.
std::string value_or_empty(const EnvironmentVariables& variables, const std::string& name);

// Reads a variable's text as a number. Throws std::invalid_argument, naming the variable, where it is none.
int64_t whole_number(const std::string& name, const std::string& text);

// Holds the values of one launcher's variables.
struct LauncherVariables {
  std::string launcher;
  std::optional<int64_t> rank;
  std::optional<int64_t> size;
  std::optional<int64_t> local_rank;
  std::optional<int64_t> local_size;
  std::vector<std::string> seen;  // "RANK=3"
};

// Returns the first launcher's variables that are present, in the order and after the comparisons that
// resolve_environment describes; nullopt where there are none. Throws std::invalid_argument on sets that disagree, and
// on an incomplete or impossible one.
std::optional<LauncherVariables> choose_launcher(const EnvironmentVariables& variables);

// Returns the name of the variable by which a launcher gives the local rank.
std::string local_rank_name(const std::string& launcher);

// Returns the launcher's identifiers of this job on this host, and on all hosts, as "NAME=VALUE NAME=VALUE", or "".
std::string job_id_of(const EnvironmentVariables& variables, const std::string& launcher);
std::string job_key_of(const EnvironmentVariables& variables, const std::string& launcher);

// Returns the MPI launcher whose variables give this process the rank and size of `chosen`, or "".
std::string mpi_launcher(const EnvironmentVariables& variables, const LauncherVariables& chosen);

// Returns text such as "OMPI_COMM_WORLD_RANK=1, PMIX_RANK=1", or "none".
std::string mpi_variables_seen(const EnvironmentVariables& variables);

}  // namespace tessera

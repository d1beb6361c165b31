#include "tessera/tools/launcher/rank_environment.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera {
namespace {

// torchrun, Open MPI, MPICH, Slurm and Tessera tell a process its rank in variables with these prefixes. A rank throws
// an error when two sets of them disagree.
constexpr std::array<std::string_view, 18> kOtherLaunchers = {
    "TESSERA_RANK",
    "TESSERA_WORLD_SIZE",
    "TESSERA_LOCAL_",
    "TORCHELASTIC_",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP",
};

bool belongs_to_a_launcher(std::string_view name) {
  return std::any_of(kOtherLaunchers.begin(), kOtherLaunchers.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// Returns how many threads a rank gets where `size` of them share the cores that this process may use.
int64_t threads_of_rank(int64_t size) {
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return std::max<int64_t>(1, CPU_COUNT(&cores) / size);
}

}  // namespace

std::map<std::string, std::string> environment_without_launchers() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos || belongs_to_a_launcher(text.substr(0, equals))) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::vector<std::string> rank_environment(int64_t rank, int64_t size, const std::string& store_path,
                                          const std::map<std::string, std::string>& extra) {
  std::map<std::string, std::string> variables = environment_without_launchers();
  variables.emplace("OMP_NUM_THREADS", std::to_string(threads_of_rank(size)));
  for (const char* name : {"RANK", "LOCAL_RANK"}) variables[name] = std::to_string(rank);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"}) variables[name] = std::to_string(size);
  variables["TESSERA_STORE"] = store_path;
  for (const auto& [name, value] : extra) variables[name] = value;

  std::vector<std::string> lines;
  lines.reserve(variables.size());
  for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
  return lines;
}

}  // namespace tessera

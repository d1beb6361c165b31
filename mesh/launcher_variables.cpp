#include "tessera/mesh/launcher_variables.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera {
namespace {

// Lists the names of one launcher's variables for each of the four numbers. The first name that is set is used.
struct Names {
  std::string launcher;
  std::vector<std::string> rank;
  std::vector<std::string> size;
  std::vector<std::string> local_rank;
  std::vector<std::string> local_size;
};

const std::vector<Names>& launchers() {
  static const std::vector<Names> names = {
      {"TESSERA_*", {"TESSERA_RANK"}, {"TESSERA_WORLD_SIZE"}, {"TESSERA_LOCAL_RANK"}, {"TESSERA_LOCAL_WORLD_SIZE"}},
      {"torchrun", {"RANK"}, {"WORLD_SIZE"}, {"LOCAL_RANK"}, {"LOCAL_WORLD_SIZE"}},
      {"Open MPI",
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {"MPICH", {"PMI_RANK"}, {"PMI_SIZE"}, {"MPI_LOCALRANKID"}, {"MPI_LOCALNRANKS"}},
      {"Slurm", {"SLURM_PROCID"}, {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"}, {"SLURM_LOCALID"}, {}},
  };
  return names;
}

std::optional<int64_t> read(const EnvironmentVariables& variables, const std::vector<std::string>& names,
                            std::vector<std::string>& seen) {
  for (const std::string& name : names) {
    const auto found = variables.find(name);
    if (found == variables.end()) continue;
    seen.push_back(fmt::format("{}={}", name, found->second));
    return whole_number(name, found->second);
  }
  return std::nullopt;
}

// Returns the number of this step's tasks on node `node`, from text such as "4(x2),3".
std::optional<int64_t> tasks_on_node(const std::string& text, int64_t node) {
  int64_t first = 0;
  std::size_t start = 0;
  while (start < text.size()) {
    const std::size_t comma = std::min(text.find(',', start), text.size());
    const std::string item = text.substr(start, comma - start);
    const std::size_t times = item.find("(x");
    const int64_t tasks = whole_number("SLURM_STEP_TASKS_PER_NODE", item.substr(0, times));
    const int64_t nodes = times == std::string::npos ? 1
                                                     : whole_number("SLURM_STEP_TASKS_PER_NODE",
                                                                    item.substr(times + 2, item.size() - times - 3));
    if (node < first + nodes) return tasks;
    first += nodes;
    start = comma + 1;
  }
  return std::nullopt;
}

std::optional<int64_t> slurm_local_size(const EnvironmentVariables& variables, const LauncherVariables& slurm) {
  const std::string tasks = value_or_empty(variables, "SLURM_STEP_TASKS_PER_NODE");
  const std::string node = value_or_empty(variables, "SLURM_NODEID");
  if (!tasks.empty() && !node.empty()) {
    if (const auto found = tasks_on_node(tasks, whole_number("SLURM_NODEID", node))) return found;
  }
  if (value_or_empty(variables, "SLURM_STEP_NUM_NODES") == "1") return slurm.size;
  const std::string per_node = value_or_empty(variables, "SLURM_NTASKS_PER_NODE");
  if (!per_node.empty()) return whole_number("SLURM_NTASKS_PER_NODE", per_node);
  return std::nullopt;
}

bool is_slurm_step(const EnvironmentVariables& variables) {
  return variables.contains("SLURM_PROCID") &&
         (variables.contains("SLURM_STEP_ID") || variables.contains("SLURM_STEPID"));
}

void check_complete(const LauncherVariables& found, const Names& names) {
  if (found.rank.has_value() == found.size.has_value()) return;
  throw std::invalid_argument(fmt::format("environment: {} without {}; set both, or neither",
                                          fmt::join(found.seen, ", "),
                                          found.rank.has_value() ? names.size.front() : names.rank.front()));
}

void check_range(const LauncherVariables& found) {
  const bool rank_ok = *found.size >= 1 && *found.rank >= 0 && *found.rank < *found.size;
  const bool local_ok = !found.local_size.has_value() || (*found.local_size >= 1 && *found.local_size <= *found.size);
  const bool local_rank_ok = !found.local_rank.has_value() ||
                             (*found.local_rank >= 0 && *found.local_rank < found.local_size.value_or(*found.size));
  if (rank_ok && local_ok && local_rank_ok) return;
  throw std::invalid_argument(
      fmt::format("environment: {} says {}; a rank must be in [0, size), a local rank in [0, local size), a local size "
                  "at most the size",
                  found.launcher, fmt::join(found.seen, ", ")));
}

std::optional<LauncherVariables> find_launcher(const EnvironmentVariables& variables, const Names& names) {
  if (names.launcher == "Slurm" && !is_slurm_step(variables)) return std::nullopt;
  LauncherVariables found{
      .launcher = names.launcher, .rank = {}, .size = {}, .local_rank = {}, .local_size = {}, .seen = {}};
  found.rank = read(variables, names.rank, found.seen);
  found.size = read(variables, names.size, found.seen);
  check_complete(found, names);
  if (!found.rank.has_value()) return std::nullopt;
  found.local_rank = read(variables, names.local_rank, found.seen);
  found.local_size =
      names.launcher == "Slurm" ? slurm_local_size(variables, found) : read(variables, names.local_size, found.seen);
  check_range(found);
  return found;
}

// Returns whether the tasks of this Slurm step are another launcher's daemons: one task per node, in which that
// launcher has started more ranks.
bool holds_daemons(const EnvironmentVariables& variables, const LauncherVariables& slurm,
                   const LauncherVariables& chosen) {
  const std::string nodes = value_or_empty(variables, "SLURM_STEP_NUM_NODES");
  return !nodes.empty() && *slurm.size == whole_number("SLURM_STEP_NUM_NODES", nodes) && *chosen.size > *slurm.size;
}

const Names& names_of(const std::string& launcher) {
  return *std::ranges::find(launchers(), launcher, &Names::launcher);
}

// Returns whether `found` is what srun gives a step for MPI by PMI-2: PMI_RANK and PMI_SIZE without local numbers. They
// repeat Slurm's own set, which has these.
bool repeats_slurm(const EnvironmentVariables& variables, const LauncherVariables& found) {
  if (found.launcher != "MPICH" || found.local_rank.has_value() || found.local_size.has_value()) return false;
  const std::optional<LauncherVariables> slurm = find_launcher(variables, names_of("Slurm"));
  return slurm.has_value() && slurm->rank == found.rank && slurm->size == found.size;
}

// Returns whether `found`, Slurm's set or that by which MPICH's mpirun serves MPI, gives the place of the one task on
// this node that runs torchrun. torchrun has started this very process and numbers ranks as it likes, so what the set
// says is of another process, also where the numbers are alike.
bool is_around_torchrun(const EnvironmentVariables& variables, const LauncherVariables& found,
                        const LauncherVariables& chosen) {
  if (chosen.launcher != "torchrun" || !variables.contains("TORCHELASTIC_RUN_ID")) return false;
  if (repeats_slurm(variables, found))
    return is_around_torchrun(variables, *find_launcher(variables, names_of("Slurm")), chosen);
  if (found.launcher == "MPICH") return found.local_size == 1;
  if (found.launcher != "Slurm") return false;
  return found.local_size == 1 || value_or_empty(variables, "SLURM_STEP_NUM_NODES") == std::to_string(*found.size);
}

// Gives `chosen` the local numbers of a set that has the same rank and size, where its own launcher gave none.
void take_local_numbers(LauncherVariables& chosen, const LauncherVariables& same) {
  if (chosen.local_rank.has_value() || chosen.local_size.has_value()) return;
  chosen.local_rank = same.local_rank;
  chosen.local_size = same.local_size;
}

// Returns "NAME=VALUE NAME=VALUE" of those of `names` that are set.
std::string listed(const EnvironmentVariables& variables, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    const std::string value = value_or_empty(variables, name);
    if (!value.empty()) text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  return text;
}

}  // namespace

std::string value_or_empty(const EnvironmentVariables& variables, const std::string& name) {
  const auto found = variables.find(name);
  return found == variables.end() ? std::string() : found->second;
}

int64_t whole_number(const std::string& name, const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty()) {
    throw std::invalid_argument(
        fmt::format("environment: {}='{}' is not a whole number; unset it or correct it", name, text));
  }
  return value;
}

std::optional<LauncherVariables> choose_launcher(const EnvironmentVariables& variables) {
  std::optional<LauncherVariables> chosen;
  for (const Names& names : launchers()) {
    const std::optional<LauncherVariables> found = find_launcher(variables, names);
    if (!found.has_value() || repeats_slurm(variables, *found)) continue;
    if (!chosen.has_value()) {
      chosen = found;
      if (names.launcher == "TESSERA_*") break;
      continue;
    }
    if (is_around_torchrun(variables, *found, *chosen)) continue;
    if (found->rank == chosen->rank && found->size == chosen->size) {
      take_local_numbers(*chosen, *found);
      continue;
    }
    if (found->launcher == "Slurm" && holds_daemons(variables, *found, *chosen)) continue;
    throw std::invalid_argument(fmt::format(
        "environment: {} and {} disagree about this process: {} against {}; unset one set, or set TESSERA_RANK and "
        "TESSERA_WORLD_SIZE",
        chosen->launcher, found->launcher, fmt::join(chosen->seen, ", "), fmt::join(found->seen, ", ")));
  }
  return chosen;
}

std::string local_rank_name(const std::string& launcher) { return names_of(launcher).local_rank.front(); }

std::string job_id_of(const EnvironmentVariables& variables, const std::string& launcher) {
  std::vector<std::string> names;
  if (launcher == "torchrun") names = {"TORCHELASTIC_RUN_ID"};
  if (launcher == "Open MPI") names = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMIX_SERVER_TMPDIR"};
  if (launcher == "MPICH") names = {"PMI_JOBID", "HYDRA_JOB_ID", "PMI_PORT"};
  if (launcher == "Slurm") names = {"SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_RESTART_COUNT"};
  return listed(variables, names);
}

std::string job_key_of(const EnvironmentVariables& variables, const std::string& launcher) {
  if (std::string given = listed(variables, {"TESSERA_JOB"}); !given.empty()) return given;
  if (launcher == "torchrun") return listed(variables, {"TORCHELASTIC_RUN_ID"});
  if (launcher == "Open MPI") return listed(variables, {"PMIX_NAMESPACE"});
  if (launcher == "Slurm") return job_id_of(variables, launcher);
  return "";
}

std::string mpi_launcher(const EnvironmentVariables& variables, const LauncherVariables& chosen) {
  for (const Names& names : launchers()) {
    if (names.launcher != "Open MPI" && names.launcher != "MPICH") continue;
    const std::optional<LauncherVariables> found = find_launcher(variables, names);
    if (!found.has_value() || is_around_torchrun(variables, *found, chosen)) continue;
    if (found->rank == chosen.rank && found->size == chosen.size) return names.launcher;
  }
  const std::optional<LauncherVariables> slurm =
      chosen.launcher == "torchrun" ? find_launcher(variables, names_of("Slurm")) : std::nullopt;
  if (slurm.has_value() && is_around_torchrun(variables, *slurm, chosen)) return "";
  // srun --mpi=pmix sets only the rank.
  return value_or_empty(variables, "PMIX_RANK") == std::to_string(*chosen.rank) ? "PMIx" : "";
}

std::string mpi_variables_seen(const EnvironmentVariables& variables) {
  std::vector<std::string> seen;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"}) {
    if (variables.contains(name)) seen.push_back(fmt::format("{}={}", name, variables.at(name)));
  }
  return seen.empty() ? "none" : fmt::format("{}", fmt::join(seen, ", "));
}

}  // namespace tessera

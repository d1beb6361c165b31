#include "tessera/mesh/environment.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "tessera/mesh/group_options.h"

namespace tessera {
namespace {

// Holds the values of one launcher's variables.
struct Found {
  std::string launcher;
  std::optional<int64_t> rank;
  std::optional<int64_t> size;
  std::optional<int64_t> local_rank;
  std::optional<int64_t> local_size;
  std::vector<std::string> seen;  // "RANK=3"
};

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

std::string value_or_empty(const EnvironmentVariables& variables, const std::string& name) {
  const auto found = variables.find(name);
  return found == variables.end() ? std::string() : found->second;
}

int64_t parse_number(const std::string& name, const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty()) {
    throw std::invalid_argument(
        fmt::format("environment: {}='{}' is not a whole number; unset it or correct it", name, text));
  }
  return value;
}

std::optional<int64_t> read(const EnvironmentVariables& variables, const std::vector<std::string>& names,
                            std::vector<std::string>& seen) {
  for (const std::string& name : names) {
    const auto found = variables.find(name);
    if (found == variables.end()) continue;
    seen.push_back(fmt::format("{}={}", name, found->second));
    return parse_number(name, found->second);
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
    const int64_t tasks = parse_number("SLURM_STEP_TASKS_PER_NODE", item.substr(0, times));
    const int64_t nodes = times == std::string::npos ? 1
                                                     : parse_number("SLURM_STEP_TASKS_PER_NODE",
                                                                    item.substr(times + 2, item.size() - times - 3));
    if (node < first + nodes) return tasks;
    first += nodes;
    start = comma + 1;
  }
  return std::nullopt;
}

std::optional<int64_t> slurm_local_size(const EnvironmentVariables& variables, const Found& slurm) {
  const std::string tasks = value_or_empty(variables, "SLURM_STEP_TASKS_PER_NODE");
  const std::string node = value_or_empty(variables, "SLURM_NODEID");
  if (!tasks.empty() && !node.empty()) {
    if (const auto found = tasks_on_node(tasks, parse_number("SLURM_NODEID", node))) return found;
  }
  if (value_or_empty(variables, "SLURM_STEP_NUM_NODES") == "1") return slurm.size;
  const std::string per_node = value_or_empty(variables, "SLURM_NTASKS_PER_NODE");
  if (!per_node.empty()) return parse_number("SLURM_NTASKS_PER_NODE", per_node);
  return std::nullopt;
}

bool is_slurm_step(const EnvironmentVariables& variables) {
  return variables.contains("SLURM_PROCID") &&
         (variables.contains("SLURM_STEP_ID") || variables.contains("SLURM_STEPID"));
}

void check_complete(const Found& found, const Names& names) {
  if (found.rank.has_value() == found.size.has_value()) return;
  throw std::invalid_argument(fmt::format("environment: {} without {}; set both, or neither",
                                          fmt::join(found.seen, ", "),
                                          found.rank.has_value() ? names.size.front() : names.rank.front()));
}

void check_range(const Found& found) {
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

std::optional<Found> find_launcher(const EnvironmentVariables& variables, const Names& names) {
  if (names.launcher == "Slurm" && !is_slurm_step(variables)) return std::nullopt;
  Found found{.launcher = names.launcher, .rank = {}, .size = {}, .local_rank = {}, .local_size = {}, .seen = {}};
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
bool holds_daemons(const EnvironmentVariables& variables, const Found& slurm, const Found& chosen) {
  const std::string nodes = value_or_empty(variables, "SLURM_STEP_NUM_NODES");
  return !nodes.empty() && *slurm.size == parse_number("SLURM_STEP_NUM_NODES", nodes) && *chosen.size > *slurm.size;
}

const Names& names_of(const std::string& launcher) {
  return *std::ranges::find(launchers(), launcher, &Names::launcher);
}

// Returns whether `found` is what srun gives a step for MPI by PMI-2: PMI_RANK and PMI_SIZE without local numbers. They
// repeat Slurm's own set, which has these.
bool repeats_slurm(const EnvironmentVariables& variables, const Found& found) {
  if (found.launcher != "MPICH" || found.local_rank.has_value() || found.local_size.has_value()) return false;
  const std::optional<Found> slurm = find_launcher(variables, names_of("Slurm"));
  return slurm.has_value() && slurm->rank == found.rank && slurm->size == found.size;
}

// Returns whether `found`, Slurm's set or that by which MPICH's mpirun serves MPI, gives the place of the one task on
// this node that runs torchrun. torchrun has started this very process and numbers ranks as it likes, so what the set
// says is of another process, also where the numbers are alike.
bool is_around_torchrun(const EnvironmentVariables& variables, const Found& found, const Found& chosen) {
  if (chosen.launcher != "torchrun" || !variables.contains("TORCHELASTIC_RUN_ID")) return false;
  if (repeats_slurm(variables, found))
    return is_around_torchrun(variables, *find_launcher(variables, names_of("Slurm")), chosen);
  if (found.launcher == "MPICH") return found.local_size == 1;
  if (found.launcher != "Slurm") return false;
  return found.local_size == 1 || value_or_empty(variables, "SLURM_STEP_NUM_NODES") == std::to_string(*found.size);
}

// Gives `chosen` the local numbers of a set that has the same rank and size, where its own launcher gave none.
void take_local_numbers(Found& chosen, const Found& same) {
  if (chosen.local_rank.has_value() || chosen.local_size.has_value()) return;
  chosen.local_rank = same.local_rank;
  chosen.local_size = same.local_size;
}

// Returns the first set that is present, after comparing it with the others.
std::optional<Found> choose(const EnvironmentVariables& variables) {
  std::optional<Found> chosen;
  for (const Names& names : launchers()) {
    const std::optional<Found> found = find_launcher(variables, names);
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

// Returns "NAME=VALUE NAME=VALUE" of those of `names` that are set.
std::string listed(const EnvironmentVariables& variables, const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    const std::string value = value_or_empty(variables, name);
    if (!value.empty()) text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  return text;
}

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

void read_secret(const EnvironmentVariables& variables, Environment& environment) {
  environment.secret = value_or_empty(variables, "TESSERA_SECRET");
  environment.secret_file = value_or_empty(variables, "TESSERA_SECRET_FILE");
  for (const char* const name : {"TESSERA_SECRET", "TESSERA_SECRET_FILE"}) {
    const auto given = variables.find(name);
    if (given == variables.end() || !given->second.empty()) continue;
    throw std::invalid_argument(fmt::format(
        "environment: {} is set and empty, so nothing would be signed; give it a value, or unset it", name));
  }
  if (environment.secret.empty() || environment.secret_file.empty()) return;
  throw std::invalid_argument("environment: TESSERA_SECRET and TESSERA_SECRET_FILE are both set; unset one");
}

int64_t restarts_of(const EnvironmentVariables& variables) {
  const std::string text = value_or_empty(variables, "TORCHELASTIC_RESTART_COUNT");
  return text.empty() ? 0 : parse_number("TORCHELASTIC_RESTART_COUNT", text);
}

void read_address(const EnvironmentVariables& variables, Environment& environment) {
  environment.store_path = value_or_empty(variables, "TESSERA_STORE");
  while (environment.store_path.size() > 1 && environment.store_path.back() == '/') environment.store_path.pop_back();
  environment.master_address = value_or_empty(variables, "MASTER_ADDR");
  const std::string port = value_or_empty(variables, "MASTER_PORT");
  if (!port.empty()) {
    environment.master_port = parse_number("MASTER_PORT", port);
    if (environment.master_port < 1 || environment.master_port > 65535) {
      throw std::invalid_argument(fmt::format("environment: MASTER_PORT={} is not in [1, 65535]", port));
    }
  }
  const std::string agent = value_or_empty(variables, "TORCHELASTIC_USE_AGENT_STORE");
  environment.agent_store = agent == "True" || agent == "true" || agent == "1";
  environment.restart_count = restarts_of(variables);
}

// Without local variables, all ranks count as on one host if they find each other through a file or a loopback address;
// otherwise each counts as alone on its host.
void fill_local(const Found& found, Environment& environment) {
  const bool meets_here = !environment.store_path.empty() || is_loopback(environment.master_address);
  if (!found.local_size.has_value() && found.local_rank.has_value() && !meets_here && environment.size > 1) {
    throw std::invalid_argument(fmt::format("environment: {} says {} but not how many ranks this host has; set {}",
                                            found.launcher, fmt::join(found.seen, ", "),
                                            found.launcher == "torchrun"
                                                ? "LOCAL_WORLD_SIZE"
                                                : "TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_LOCAL_RANK and "
                                                  "TESSERA_LOCAL_WORLD_SIZE"));
  }
  environment.local_size = found.local_size.value_or(meets_here ? environment.size : 1);
  if (!found.local_rank.has_value() && environment.local_size > 1 && !environment.one_host()) {
    throw std::invalid_argument(
        fmt::format("environment: {} says {} but not which of this host's {} ranks this is; set {} too", found.launcher,
                    fmt::join(found.seen, ", "), environment.local_size, names_of(found.launcher).local_rank.front()));
  }
  environment.local_rank = found.local_rank.value_or(environment.one_host() ? environment.rank : 0);
}

void read_timeout(const EnvironmentVariables& variables, Environment& environment) {
  const std::string text = value_or_empty(variables, "TESSERA_TIMEOUT");
  if (text.empty()) return;
  const int64_t seconds = parse_number("TESSERA_TIMEOUT", text);
  const int64_t longest = std::chrono::floor<std::chrono::seconds>(kLongestTimeout).count();
  if (seconds < 1 || seconds > longest) {
    throw std::invalid_argument(
        fmt::format("environment: TESSERA_TIMEOUT={} is not in [1, {}] seconds", text, longest));
  }
  environment.timeout_seconds = seconds;
}

// Returns the MPI launcher whose variables give this process the rank and size of `chosen`, or "".
std::string mpi_launcher(const EnvironmentVariables& variables, const Found& chosen) {
  for (const Names& names : launchers()) {
    if (names.launcher != "Open MPI" && names.launcher != "MPICH") continue;
    const std::optional<Found> found = find_launcher(variables, names);
    if (!found.has_value() || is_around_torchrun(variables, *found, chosen)) continue;
    if (found->rank == chosen.rank && found->size == chosen.size) return names.launcher;
  }
  const std::optional<Found> slurm =
      chosen.launcher == "torchrun" ? find_launcher(variables, names_of("Slurm")) : std::nullopt;
  if (slurm.has_value() && is_around_torchrun(variables, *slurm, chosen)) return "";
  // srun --mpi=pmix sets only the rank.
  return value_or_empty(variables, "PMIX_RANK") == std::to_string(*chosen.rank) ? "PMIx" : "";
}

// Returns text such as "OMPI_COMM_WORLD_RANK=1, PMIX_RANK=1", or "none".
std::string mpi_variables_seen(const EnvironmentVariables& variables) {
  std::vector<std::string> seen;
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK"}) {
    if (variables.contains(name)) seen.push_back(fmt::format("{}={}", name, variables.at(name)));
  }
  return seen.empty() ? "none" : fmt::format("{}", fmt::join(seen, ", "));
}

void read_backend(const EnvironmentVariables& variables, const std::optional<Found>& chosen, Environment& environment) {
  environment.cuda_backend = value_or_empty(variables, "TESSERA_CUDA_BACKEND");
  if (!environment.cuda_backend.empty() && environment.cuda_backend != "nccl" && environment.cuda_backend != "gloo") {
    throw std::invalid_argument(fmt::format(
        "environment: TESSERA_CUDA_BACKEND={} is no backend for CUDA tensors; set nccl or gloo, or unset it",
        environment.cuda_backend));
  }
  environment.backend = value_or_empty(variables, "TESSERA_BACKEND");
  if (chosen.has_value()) environment.mpi = mpi_launcher(variables, *chosen);
  if (!environment.backend.empty() && environment.backend != "mpi" && environment.backend != "gloo") {
    throw std::invalid_argument(fmt::format(
        "environment: TESSERA_BACKEND={} is no backend; set mpi or gloo, or unset it", environment.backend));
  }
  if (environment.backend != "mpi" || environment.size == 1 || !environment.mpi.empty()) return;
  throw std::invalid_argument(
      fmt::format("environment: TESSERA_BACKEND=mpi, but no MPI started this process as rank {} of {} ({} did: {}; "
                  "variables of MPI: {}); "
                  "start it with mpirun or tools/launch --backend mpi, or unset TESSERA_BACKEND",
                  environment.rank, environment.size, environment.launcher, fmt::join(chosen->seen, ", "),
                  mpi_variables_seen(variables)));
}

}  // namespace

bool checked_by(const EnvironmentVariables& variables) {
  const std::string text = value_or_empty(variables, "TESSERA_CHECKED");
  if (text == "1") return true;
  if (text.empty() || text == "0") return false;
  throw std::invalid_argument(fmt::format("environment: TESSERA_CHECKED={} is neither 0 nor 1", text));
}

std::string records_folder_by(const EnvironmentVariables& variables) {
  const std::string folder = value_or_empty(variables, "TESSERA_RECORDS");
  const int64_t restarts = folder.empty() ? 0 : restarts_of(variables);
  return restarts > 0 ? fmt::format("{}/restart_{}", folder, restarts) : folder;
}

Environment resolve_environment(const EnvironmentVariables& variables) {
  Environment environment;
  read_address(variables, environment);
  read_timeout(variables, environment);
  environment.checked = checked_by(variables);
  const std::optional<Found> found = choose(variables);
  if (!found.has_value()) {
    read_backend(variables, found, environment);
    return environment;
  }
  environment.launcher = found->launcher;
  environment.rank = *found->rank;
  environment.size = *found->size;
  environment.job_id = job_id_of(variables, found->launcher);
  read_secret(variables, environment);
  environment.records_folder = records_folder_by(variables);
  environment.job_key = job_key_of(variables, found->launcher);
  fill_local(*found, environment);
  read_backend(variables, found, environment);
  return environment;
}

EnvironmentVariables process_environment() {
  EnvironmentVariables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos) variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

}  // namespace tessera

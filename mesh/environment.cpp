#include "tessera/mesh/environment.h"

#include <chrono>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/group_options.h"
#include "tessera/mesh/launcher_variables.h"

namespace tessera {
namespace {

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
  return text.empty() ? 0 : whole_number("TORCHELASTIC_RESTART_COUNT", text);
}

void read_address(const EnvironmentVariables& variables, Environment& environment) {
  environment.store_path = value_or_empty(variables, "TESSERA_STORE");
  while (environment.store_path.size() > 1 && environment.store_path.back() == '/') environment.store_path.pop_back();
  environment.master_address = value_or_empty(variables, "MASTER_ADDR");
  const std::string port = value_or_empty(variables, "MASTER_PORT");
  if (!port.empty()) {
    environment.master_port = whole_number("MASTER_PORT", port);
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
void fill_local(const LauncherVariables& found, Environment& environment) {
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
                    fmt::join(found.seen, ", "), environment.local_size, local_rank_name(found.launcher)));
  }
  environment.local_rank = found.local_rank.value_or(environment.one_host() ? environment.rank : 0);
}

void read_timeout(const EnvironmentVariables& variables, Environment& environment) {
  const std::string text = value_or_empty(variables, "TESSERA_TIMEOUT");
  if (text.empty()) return;
  const int64_t seconds = whole_number("TESSERA_TIMEOUT", text);
  const int64_t longest = std::chrono::floor<std::chrono::seconds>(kLongestTimeout).count();
  if (seconds < 1 || seconds > longest) {
    throw std::invalid_argument(
        fmt::format("environment: TESSERA_TIMEOUT={} is not in [1, {}] seconds", text, longest));
  }
  environment.timeout_seconds = seconds;
}

void read_backend(const EnvironmentVariables& variables, const std::optional<LauncherVariables>& chosen,
                  Environment& environment) {
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
  const std::optional<LauncherVariables> found = choose_launcher(variables);
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

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

}  // namespace tessera

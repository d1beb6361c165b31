#include "tessera/tests/faults/ranks_run.h"

#include <algorithm>
#include <ctime>
#include <filesystem>

#include <fmt/format.h>

#include "tessera/tests/harness/fork_server.h"
#include "tessera/tools/launcher/mpi_job.h"

namespace tessera::faults {
namespace {

// It is longer than the limit and two seconds, within which survivors end by themselves.
constexpr std::chrono::milliseconds kGrace{5500};
constexpr std::chrono::seconds kLimit{40};

testing::ForkServer& fork_server() {
  static testing::ForkServer only;
  return only;
}

}  // namespace

double now_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::vector<std::string> RanksRun::after(int64_t rank, const std::string& start) const {
  std::vector<std::string> found;
  const auto written = lines.find(rank);
  if (written == lines.end()) return found;
  for (const Line& line : written->second) {
    if (line.text.starts_with(start)) found.push_back(line.text.substr(start.size()));
  }
  return found;
}

RankOutcome RanksRun::outcome_of(int64_t rank) const {
  RankOutcome outcome = {.errors = after(rank, "error: ")};
  outcome.done = !after(rank, "done").empty();
  if (lines.contains(rank)) {
    for (const Line& line : lines.at(rank)) {
      if (!outcome.said && line.text.starts_with("error: ")) outcome.said = line.time;
    }
  }
  if (ended.contains(rank)) outcome.ended = ended.at(rank);
  return outcome;
}

std::optional<double> RanksRun::fault_time() const {
  for (const auto& [rank, written] : lines) {
    const std::vector<std::string> times = after(rank, "fault ");
    if (!times.empty()) return 1e-9 * std::stod(times.front());
  }
  return std::nullopt;
}

std::string RanksRun::output() const {
  double zero = all_ended;
  for (const auto& [rank, written] : lines) zero = std::min(zero, written.front().time);
  zero = fault_time().value_or(zero);
  std::string text;
  for (const auto& [rank, written] : lines) {
    for (const Line& line : written) {
      if (!line.text.starts_with("visits "))
        text += fmt::format("[{}] {:+.2f} {}\n", rank, line.time - zero, line.text);
    }
    if (ended.contains(rank)) text += fmt::format("[{}] {:+.2f} (has exited)\n", rank, ended.at(rank) - zero);
  }
  return text;
}

RanksRun run_ranks(const RanksOptions& options) {
  RanksRun run;
  std::optional<MpiJob> mpi;
  if (options.backend == "mpi") mpi.emplace(options.size);
  std::vector<std::string> command = {std::filesystem::read_symlink("/proc/self/exe"), "job"};
  command.insert(command.end(), options.arguments.begin(), options.arguments.end());
  testing::ForkServer& server = fork_server();
  run.result = run_process_group({
      .command = command,
      .size = options.size,
      .store_path = options.store,
      .environment = options.environment,
      .rank_variables =
          [&](int64_t rank) {
            Variables all = mpi ? mpi->variables(rank) : Variables();
            if (options.rank_variables) all.merge(options.rank_variables(rank));
            return all;
          },
      .time_limit = kLimit,
      .stopped_limit = options.stopped_limit,
      .grace = kGrace,
      .spawn = [&](const auto& arguments, const auto& environment,
                   pid_t group) { return server.start(arguments, environment, group); },
      .is_done =
          [&](int64_t rank) {
            run.ended[rank] = now_seconds();
            return true;
          },
      .sinks = {.on_line =
                    [&](int64_t rank, OutputStream, std::string_view line) {
                      run.lines[rank].push_back({now_seconds(), std::string(line)});
                    }},
  });
  run.all_ended = now_seconds();
  return run;
}

}  // namespace tessera::faults

#include "tessera/tests/mesh/failing_jobs.h"

#include <optional>
#include <string_view>
#include <utility>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/mesh/free_port.h"
#include "tessera/tools/launcher/mpi_job.h"
#include "tessera/tools/launcher/private_folder.h"

namespace tessera::testing {

using Clock = std::chrono::steady_clock;

std::vector<Line> Job::starting_with(int64_t rank, const std::string& start) const {
  std::vector<Line> found;
  if (!lines.contains(rank)) return found;
  for (const Line& line : lines.at(rank)) {
    if (line.text.starts_with(start)) found.push_back(line);
  }
  return found;
}

std::string Job::all() const {
  std::string text;
  for (const auto& [rank, written] : lines) {
    for (const Line& line : written) text += fmt::format("[{}] {}\n", rank, line.text);
  }
  return text;
}

Job run_job(const std::string& how, int64_t size, std::map<std::string, std::string> environment, const Where& where) {
  const PrivateFolder folder;
  std::vector<std::string> command = {"tests/mesh/failing_job", how};
  if (!where.victim.empty()) command.push_back(where.victim);
  std::optional<MpiJob> mpi;
  if (is_over_mpi()) mpi.emplace(size);
  Job job;
  job.result = run_process_group({
      .command = command,
      .size = size,
      .store_path = (where.folder.empty() ? folder.path() : where.folder) + "/store",
      .environment = std::move(environment),
      .rank_variables = [&](int64_t rank) { return mpi ? mpi->variables(rank) : std::map<std::string, std::string>(); },
      .time_limit = std::chrono::seconds(50),
      .grace = how.starts_with("is stopped") ? std::chrono::milliseconds(2500) : std::chrono::milliseconds(4000),
      .is_done =
          [&](int64_t rank) {
            job.ended[rank] = Clock::now();
            return true;
          },
      .sinks = {.on_line =
                    [&](int64_t rank, OutputStream, std::string_view line) {
                      job.lines[rank].push_back({Clock::now(), std::string(line)});
                    }},
  });
  return job;
}

void check_others_ended(const Job& job, int64_t size, const std::vector<std::string>& parts, int64_t victim,
                        double seconds) {
  const std::string all = job.all();
  INFO(all);
  CHECK_FALSE(job.result.timed_out);
  if (victim < 0) victim = size - 1;
  const std::vector<Line> fault = job.starting_with(victim, "fault");
  REQUIRE(fault.size() == 1);
  for (int64_t rank = 0; rank < size; ++rank) {
    if (rank == victim) continue;
    CAPTURE(rank);
    const std::vector<Line> errors = job.starting_with(rank, "error: ");
    REQUIRE(errors.size() == 2);
    CHECK(std::chrono::duration<double>(errors[0].time - fault[0].time).count() < seconds);
    CHECK(errors[0].text.find(fmt::format("rank {}", rank)) != std::string::npos);
    CHECK(errors[1].text.find("the job has failed") != std::string::npos);
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(errors[0].text.find(part) != std::string::npos);
    }
    // The last part is the reason.
    CHECK(errors[1].text.find(parts.back()) != std::string::npos);
  }
}

std::map<std::string, std::string> tcp_store() {
  return {{"TESSERA_STORE", ""},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(free_port())},
          {"LOCAL_RANK", "0"},
          {"LOCAL_WORLD_SIZE", "1"}};
}

}  // namespace tessera::testing

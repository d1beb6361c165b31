// tools/records FOLDER [--trace FILE]: says where the ranks of a failed job first did different things, and writes what
// they did as a trace.

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "tessera/inspect/parting.h"
#include "tessera/inspect/trace.h"
#include "tessera/mesh/record_file.h"
#include "tessera/mesh/recorder.h"

namespace {

constexpr const char* kUsage =
    "usage: tools/records FOLDER [--trace FILE]\n"
    "FOLDER is what TESSERA_RECORDS named when the job failed. FILE is a trace of all records in it, which\n"
    "https://ui.perfetto.dev opens. Its times are those of the ranks' own clocks, which may differ between hosts.\n";

void save_trace(const std::vector<tessera::RankRecords>& ranks, const std::string& path) {
  std::vector<tessera::Record> all;
  for (const tessera::RankRecords& one : ranks) all.insert(all.end(), one.records.begin(), one.records.end());
  const std::string trace = tessera::chrome_trace(all);
  std::ofstream file(path);
  file << trace;
  file.close();
  if (!file) throw std::runtime_error(fmt::format("the trace cannot be written to {}: {}", path, std::strerror(errno)));
}

// Each restart has a folder in that of the job.
void name_restarts(const std::string& folder) {
  for (int restart = 1;; ++restart) {
    const std::string its_own = fmt::format("{}/restart_{}", folder, restart);
    if (!std::filesystem::is_directory(its_own)) break;
    fmt::print("{} is of restart {}\n", its_own, restart);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_traced = argc == 4 && std::string_view(argv[2]) == "--trace";
  if ((argc != 2 && !is_traced) || argv[1][0] == '-') {
    fmt::print(stderr, "{}", kUsage);
    return 2;
  }
  try {
    const std::vector<tessera::RankRecords> ranks = tessera::read_all_records(argv[1]);
    fmt::print("{}", tessera::where_ranks_part(ranks));
    name_restarts(argv[1]);
    if (is_traced) save_trace(ranks, argv[3]);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "records: {}\n", error.what());
    return 1;
  }
}

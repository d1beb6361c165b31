// tools/records FOLDER: says where the ranks of a failed job first did different things.

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <fmt/format.h>

#include "tessera/inspect/parting.h"
#include "tessera/mesh/record_file.h"

int main(int argc, char** argv) {
  if (argc != 2 || argv[1][0] == '-') {
    fmt::print(stderr, "usage: tools/records FOLDER, the folder that TESSERA_RECORDS named when the job failed\n");
    return 2;
  }
  try {
    fmt::print("{}", tessera::where_ranks_part(tessera::read_all_records(argv[1])));
    for (int restart = 1;; ++restart) {
      const std::string folder = fmt::format("{}/restart_{}", argv[1], restart);
      if (!std::filesystem::is_directory(folder)) break;
      fmt::print("{} is of restart {}\n", folder, restart);
    }
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "records: {}\n", error.what());
    return 1;
  }
}

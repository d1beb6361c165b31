#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::testing {

// Returns the root of the repository that this test was built from: its WORKSPACE is a link among the test's data.
std::filesystem::path source_root();

// Returns every file below `root` whose name ends with one of `endings`, sorted, as a path from `root`; without hidden
// folders and Bazel's links.
std::vector<std::filesystem::path> files_below(const std::filesystem::path& root,
                                               const std::vector<std::string>& endings);

}  // namespace tessera::testing

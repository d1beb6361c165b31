#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace tessera::testing {

// The root of the repository that this test was built from: its WORKSPACE is among the test's data, as a link.
std::filesystem::path source_root();

// Every file below `root` whose name ends with one of `endings`, as a path from `root`, sorted. Leaves out hidden
// folders and Bazel's links.
std::vector<std::filesystem::path> files_below(const std::filesystem::path& root,
                                               const std::vector<std::string>& endings);

}  // namespace tessera::testing

#include "tessera/tests/ground/source_tree.h"

#include <algorithm>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

bool is_left_out(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return name.starts_with(".") || name.starts_with("bazel-");
}

bool ends_with_any(const std::string& name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const std::string& ending) { return name.ends_with(ending); });
}

}  // namespace

fs::path source_root() { return fs::canonical("WORKSPACE").parent_path(); }

std::vector<fs::path> files_below(const fs::path& root, const std::vector<std::string>& endings) {
  std::vector<fs::path> found;
  for (auto it = fs::recursive_directory_iterator(root); it != fs::recursive_directory_iterator(); ++it) {
    if (it->is_directory() && is_left_out(it->path())) it.disable_recursion_pending();
    if (it->is_regular_file() && ends_with_any(it->path().filename().string(), endings)) {
      found.push_back(it->path().lexically_relative(root));
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace tessera::testing

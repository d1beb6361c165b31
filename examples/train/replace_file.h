#pragma once

#include <string>

namespace train {

// Writes a file that appears at once, in the place of one that was there. Throws std::runtime_error with the path when
// it cannot be written.
void replace_file(const std::string& path, const std::string& text);

}  // namespace train

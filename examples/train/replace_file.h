#pragma once

#include <string>

namespace train {

// Writes a file that appears at once, in the place of one that was there. When it cannot be written, it leaves the old
// one alone and throws std::runtime_error with the path and the system's reason.
void replace_file(const std::string& path, const std::string& text);

// Throws std::runtime_error with the path and the text of `error`, which is an errno, or 0 where none is known.
[[noreturn]] void throw_not_written(const std::string& path, int error);

}  // namespace train

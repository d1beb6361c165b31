#pragma once

#include <optional>
#include <string>

// Writes and reads the files by which a test reports.
namespace tessera::testing {

// Throws std::runtime_error where the file cannot be written, as on a full disk.
void write_report_file(const std::string& path, const std::string& text);

// Returns nothing where there is no such file.
std::optional<std::string> read_report_file(const std::string& path);

}  // namespace tessera::testing

#pragma once

#include <string>
#include <vector>

namespace tessera::fuzz {

// Names the file of the inputs that searches for defects of a subject have kept: together they reach all code that the
// searches have reached. A line of it is a JSON string that has a code point below 256 for each byte.
std::string kept_file(const std::string& subject);
// Throws std::runtime_error if the file cannot be read, or if a line is something else.
std::vector<std::string> read_inputs(const std::string& file);
// Writes them in an order that depends on them alone. Throws std::runtime_error if the file cannot be written.
void write_inputs(const std::string& file, std::vector<std::string> inputs);

}  // namespace tessera::fuzz

#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::fuzz {

// Names a reader of text that may come from anywhere, and inputs that it accepts. `read` may throw
// std::invalid_argument and std::runtime_error; anything else that it throws, and a property that does not hold
// (std::logic_error), is a defect.
struct Subject {
  std::string name;
  std::function<void(std::string_view)> read;
  std::vector<std::string> seeds;
};

const std::vector<Subject>& subjects();
// Throws std::invalid_argument that lists the names.
const Subject& subject(std::string_view name);

// Runs the subject on one input and passes on only what is a defect.
void try_input(const Subject& subject, std::string_view input);

// Returns a changed copy of one of `from`, which follows from `seed` alone: bytes flipped, cut out, repeated, put in
// from another input or from what readers look for.
std::string mutated(const std::vector<std::string>& from, uint64_t seed);

}  // namespace tessera::fuzz

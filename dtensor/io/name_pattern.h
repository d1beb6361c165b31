#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Matches the whole of `name` with a pattern, in which `*` stands for any characters, also none, and `?` for one.
// Returns what each of them stands for, in order; an earlier `*` stands for as few characters as it can.
//   "layers.*.w?" and "layers.10.wq" -> {"10", "q"}
std::optional<std::vector<std::string>> captures(std::string_view pattern, std::string_view name);

// Says whether captures() returns anything. Takes time in proportion to both lengths multiplied at most, and no memory:
// a name may be of a hostile file.
bool matches(std::string_view pattern, std::string_view name);

// Returns `pattern` with each `*` and `?` replaced by what `captured` has for it, in order. Requires as many as there
// are, or more.
std::string filled(std::string_view pattern, const std::vector<std::string>& captured);

// Returns how many `*` and `?` a pattern has.
std::size_t wildcards(std::string_view pattern);

}  // namespace tessera

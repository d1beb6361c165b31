#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::fuzz {

// Each of these is Subject::read for a reader that needs a file, with its seeds.

// Reads boxes and runs of the tensors of a safetensors file. The first byte of the input says how many bytes of data
// follow the header, the second draws the boxes, and the rest is the header.
void read_boxes(std::string_view input);
std::vector<std::string> box_seeds();

// Calls load_optimizer with a file whose header fits its data: what an optimizer cannot take is behind it. The input is
// the class of the optimizer, the class that the file names, param_groups, and a line "DTYPE SHAPE NAME" for each
// tensor, such as "F32 2,3 a/exp_avg" or "I64 - a/step".
void load_optimizer_state(std::string_view input);
std::vector<std::string> optimizer_seeds();

// Throws std::logic_error, which is a defect, unless the property holds.
void require(bool holds, const char* property);

}  // namespace tessera::fuzz

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/placement/placement.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace tessera {

// Describes one parameter or buffer of one module, and the part of it that this rank holds.
struct DescriptionRow {
  std::string path;          // the module's; "" is the root
  std::string type;          // "torch::nn::LinearImpl"
  std::string parameter;     // "weight"
  bool is_parameter = true;  // false: a buffer
  std::vector<int64_t> global_shape;
  std::optional<Placements> placements;  // none: a plain tensor
  std::string mesh;                      // "{dp: 2, tp: 2} on cpu"; "" for a plain tensor
  std::vector<int64_t> local_shape;
  int64_t bytes_here = 0;
  int64_t bytes_global = 0;
  std::string same_as;  // the path of an earlier row with the same tensor; this row's bytes are then 0
};

// Lists how a module's parameters and buffers are laid out, as this rank sees it. Does not communicate.
struct Description {
  std::vector<DescriptionRow> rows;  // in the order of registration

  int64_t bytes_here() const;
  int64_t bytes_global() const;
};
Description describe(torch::nn::Module& module);

// Prints a table of path, type, parameter, global shape, placements, local shape and bytes here, and a line of totals.
// Where tensors lie on several meshes, placements are followed by their mesh.
std::string to_string(const Description& description);

}  // namespace tessera

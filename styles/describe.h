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

// One parameter or buffer of one module, and what of it is here.
struct DescriptionRow {
  std::string path;          // of the module; "" is the root
  std::string type;          // "torch::nn::LinearImpl"
  std::string parameter;     // "weight"
  bool is_parameter = true;  // else a buffer
  std::vector<int64_t> global_shape;
  std::optional<Placements> placements;  // none: a plain tensor
  std::vector<int64_t> local_shape;
  int64_t bytes_here = 0;
  int64_t bytes_global = 0;
  std::string same_as;  // the path of an earlier row that is the same tensor; such a row has no bytes of its own
};

// How a module's parameters and buffers lie over the ranks, as this rank sees it. No communication.
struct Description {
  std::vector<DescriptionRow> rows;  // in the order of registration

  int64_t bytes_here() const;
  int64_t bytes_global() const;
};
Description describe(torch::nn::Module& module);

// A table of path, type, parameter, global shape, placements, local shape and bytes here, with a line of totals.
std::string to_string(const Description& description);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// Holds the placements of a call's tensors in one run.
struct Trial {
  std::vector<Placements> layouts;
  std::vector<int64_t> mesh_shape;
};

// Returns e.g. "on {2, 2}: [S(0), R] [R, P(sum)]".
std::string to_string(const Trial& trial);

// Returns trials on meshes of 2, 3 and 4 ranks in one dimension and {2, 2}: the first tensor in every placement, then
// all tensors in placements drawn from `seed`. Pieces are uneven, and some are empty. Returns none if the call takes no
// tensors.
std::vector<Trial> trials(const WholeCall& call, uint64_t seed);

// Returns the trial in which everything is replicated on one rank.
Trial one_rank(const WholeCall& call);

// Returns the placements in which a tensor is tried. A tensor that is written is not cut into blocks, and one into
// which numbers are drawn is not pending.
Placements candidates(const at::Tensor& t, bool written, bool random);

// Holds the pieces of tensors in a trial's layouts, made once for all ranks.
class Placed {
 public:
  Placed(const std::vector<at::Tensor>& wholes, const Trial& trial);

  // Returns this rank's DTensors. Undefined tensors stay undefined.
  std::vector<at::Tensor> on(const DeviceMesh& mesh, std::size_t rank) const;

 private:
  std::vector<at::Tensor> wholes_;
  std::vector<Placements> layouts_;
  std::vector<std::vector<at::Tensor>> pieces_;  // [tensor][rank]
};

// Says how a run on DTensors compares with the same run on plain tensors, from best to worst.
enum class Verdict : uint8_t {
  kByRule,        // the results are the same, and no input was replicated because a rule was missing
  kReplicated,    // the results are the same, but something was replicated
  kRefused,       // the same error on every rank
  kRefusedByOne,  // an error that not all ranks threw alike
  kWrong,         // the results differ
};

struct Finding {
  Verdict verdict = Verdict::kByRule;
  std::string text;  // what was wrong or refused, with the layouts
};

// Runs `body` on the ranks of the trial's mesh. `body` returns what is wrong, or "".
Finding on_ranks(const Trial& trial, const std::function<std::string(const DeviceMesh&, std::size_t rank)>& body);

// Returns what is wrong with `mine`, a whole tensor or a DTensor, compared with the plain tensor `whole`; "" if nothing
// is.
std::string compare_tensor(const at::Tensor& mine, const at::Tensor& whole, bool values = true);

}  // namespace tessera::testing

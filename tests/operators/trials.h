#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"
#include "tessera/tests/ops/rules/sample.h"

namespace tessera::testing {

// How the tensors of a call lie in one run.
struct Trial {
  std::vector<Placements> layouts;
  std::vector<int64_t> mesh_shape;
};

// "on {2, 2}: [S(0), R] [R, P(sum)]"
std::string to_string(const Trial& trial);

// Meshes of 2, 3 and 4 ranks in one dimension and {2, 2}: the first tensor in every placement, then all tensors in
// placements drawn from `seed`; pieces are uneven, and some empty. None where the call takes no tensors.
std::vector<Trial> trials(const WholeCall& call, uint64_t seed);

// Everything replicated on one rank.
Trial one_rank(const WholeCall& call);

// The placements in which a tensor is tried. One that is written is not cut into blocks; nor, where numbers are drawn
// into it, pending.
Placements candidates(const at::Tensor& t, bool written, bool random);

// The pieces of tensors that lie as a trial says: drawn once, for all ranks.
class Placed {
 public:
  Placed(const std::vector<at::Tensor>& wholes, const Trial& trial);

  // This rank's DTensors; what is undefined stays so.
  std::vector<at::Tensor> on(const DeviceMesh& mesh, std::size_t rank) const;

 private:
  std::vector<at::Tensor> wholes_;
  std::vector<Placements> layouts_;
  std::vector<std::vector<at::Tensor>> pieces_;  // by tensor, then by rank
};

// What became of a run on DTensors beside the same on plain tensors, from the best to the worst.
enum class Verdict : uint8_t {
  kByRule,      // the same results; no input was brought to Replicate for want of a rule
  kReplicated,  // the same results, by replicating somewhere
  kRefused,     // an error, on every rank alike
  kWrong,       // other results
};

struct Finding {
  Verdict verdict = Verdict::kByRule;
  std::string text;  // what was wrong or refused, with the layouts
};

// Runs `body` on the ranks of the trial's mesh; it returns what is wrong, "" for nothing.
Finding on_ranks(const Trial& trial, const std::function<std::string(const DeviceMesh&, std::size_t rank)>& body);

// What is wrong with `mine`, whole or a DTensor, beside the plain `whole`; "" for nothing.
std::string compare_tensor(const at::Tensor& mine, const at::Tensor& whole, bool values = true);

}  // namespace tessera::testing

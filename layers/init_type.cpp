#include "tessera/layers/init_type.h"

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/init.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/init.h"
#include "tessera/mesh/core/deferred_tensor.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera {
namespace {

constexpr double kDeviation = 0.01;
constexpr double kConstantValue = 0.02;

constexpr std::array kNames = {
    std::pair{InitType::kOrthogonal, std::string_view("orthogonal")},
    std::pair{InitType::kNormal, std::string_view("normal")},
    std::pair{InitType::kBiasedNormal, std::string_view("biased_normal")},
    std::pair{InitType::kUniform, std::string_view("uniform")},
    std::pair{InitType::kKaimingUniform, std::string_view("kaiming_uniform")},
    std::pair{InitType::kKaimingNormal, std::string_view("kaiming_normal")},
    std::pair{InitType::kXavierUniform, std::string_view("xavier_uniform")},
    std::pair{InitType::kXavierNormal, std::string_view("xavier_normal")},
    std::pair{InitType::kTruncNormal, std::string_view("trunc_normal")},
    std::pair{InitType::kDirac, std::string_view("dirac")},
    std::pair{InitType::kConstant, std::string_view("constant")},
    std::pair{InitType::kZeros, std::string_view("zeros")},
    std::pair{InitType::kOnes, std::string_view("ones")},
};

// The ends are two hundred standard deviations away, so no number has to be drawn again.
void truncated_normal_(const at::Tensor& weight, double deviation, double end) {
  weight.normal_(0, deviation).clamp_(-end, end);
}

// Says whether the weight is a DTensor, or will be one.
bool has_pieces(const at::Tensor& weight) { return is_dtensor(weight) || detail::is_deferred(weight); }

void orthogonal(const at::Tensor& weight) {
  if (has_pieces(weight)) {
    orthogonal_(weight, kDeviation);
  } else {
    torch::nn::init::orthogonal_(weight, kDeviation);
  }
}

}  // namespace

std::string_view to_string(InitType type) {
  for (const auto& [each, name] : kNames) {
    if (each == type) return name;
  }
  return "?";
}

InitType init_type(std::string_view name) {
  std::vector<std::string_view> names;
  for (const auto& [type, each] : kNames) {
    if (each == name) return type;
    names.push_back(each);
  }
  throw std::invalid_argument(fmt::format("init_type: there is no \"{}\"; there are {}", name, fmt::join(names, ", ")));
}

void initialize_(const at::Tensor& weight, InitType type) {
  const c10::AutoGradMode none(false);
  switch (type) {
    case InitType::kOrthogonal: return orthogonal(weight);
    case InitType::kNormal:
    case InitType::kBiasedNormal: torch::nn::init::normal_(weight, 0, kDeviation); return;
    case InitType::kUniform: torch::nn::init::uniform_(weight, 0, kConstantValue); return;
    case InitType::kKaimingUniform: torch::nn::init::kaiming_uniform_(weight); return;
    case InitType::kKaimingNormal: torch::nn::init::kaiming_normal_(weight); return;
    case InitType::kXavierUniform: torch::nn::init::xavier_uniform_(weight); return;
    case InitType::kXavierNormal: torch::nn::init::xavier_normal_(weight); return;
    case InitType::kTruncNormal: return truncated_normal_(weight, kDeviation, 2);
    case InitType::kDirac: has_pieces(weight) ? dirac_(weight) : torch::nn::init::dirac_(weight); return;
    case InitType::kConstant: torch::nn::init::constant_(weight, kConstantValue); return;
    case InitType::kZeros: torch::nn::init::zeros_(weight); return;
    case InitType::kOnes: torch::nn::init::ones_(weight); return;
  }
}

InitMethod init_method(InitType type) {
  return [type](const at::Tensor& weight) { initialize_(weight, type); };
}

Placement affine_placement(int64_t tensor_dim, int64_t size, int64_t ranks, int64_t stride, bool allow_uneven) {
  if (stride < 1) throw std::invalid_argument(fmt::format("stride {}; give at least 1", stride));
  if (stride == 1 && allow_uneven) return Shard(tensor_dim);
  if (size % (ranks * stride) != 0) {
    throw std::invalid_argument(fmt::format(
        "{} features are not divisible by {}", size,
        stride == 1
            ? fmt::format("{} ranks; set allow_uneven, or pad them", ranks)
            : fmt::format("{} ranks with {} pieces each; pad them (allow_uneven needs stride 1)", ranks, stride)));
  }
  return stride == 1 ? Shard(tensor_dim) : BlockCyclic(tensor_dim, size / ranks / stride);
}

void initialize_affine_weight_(const at::Tensor& weight, int64_t out_features, int64_t in_features,
                               int64_t per_partition_size, int64_t partition_dim, const DeviceMesh& mesh,
                               const InitMethod& method, int64_t stride) {
  if (partition_dim != 0 && partition_dim != 1) {
    throw std::invalid_argument(
        fmt::format("initialize_affine_weight_: partition_dim {}; it is 0 or 1", partition_dim));
  }
  const std::array<int64_t, 2> sizes = {out_features, in_features};
  std::array<int64_t, 2> here = sizes;
  here[static_cast<std::size_t>(partition_dim)] = per_partition_size;
  check_one_dimension(mesh, "initialize_affine_weight_");
  if (is_dtensor(weight) || weight.sizes() != at::IntArrayRef(here) ||
      per_partition_size * mesh.size() != sizes[static_cast<std::size_t>(partition_dim)]) {
    throw std::invalid_argument(
        fmt::format("initialize_affine_weight_: a weight [{}] for {} of [{}, {}] along {} on mesh {}; it is this "
                    "rank's plain piece",
                    fmt::join(weight.sizes(), ", "), per_partition_size, out_features, in_features, partition_dim,
                    mesh.to_string()));
  }
  const c10::AutoGradMode none(false);
  const Placement placement =
      affine_placement(partition_dim, sizes[static_cast<std::size_t>(partition_dim)], mesh.size(), stride);
  const at::Tensor whole = empty(sizes, mesh, {placement}, weight.scalar_type());
  method(whole);
  weight.detach().copy_(to_local(whole));
}

}  // namespace tessera

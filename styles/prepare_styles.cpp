#include "tessera/styles/prepare_styles.h"

#include <algorithm>
#include <stdexcept>

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/contract.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

// Holds what a hook needs for its messages and its redistributions.
struct HookSite {
  std::string who;  // "PrepareModuleInput of layers.0.attn"
  DeviceMesh mesh;
  int64_t tensor_dim;
  std::vector<int64_t> data_dims;
};

std::string shown(const Layouts& layouts) {
  std::string text;
  for (const auto& layout : layouts) text += (text.empty() ? "" : ", ") + (layout ? tessera::to_string(*layout) : "-");
  return "[" + text + "]";
}

void check_lists(const char* who, const Layouts& from, const Layouts& to) {
  if (from.size() != to.size()) {
    throw std::invalid_argument(
        fmt::format("{}: {} layouts {} but {} desired ones {}; give one of each for every tensor, std::nullopt to "
                    "leave one as it is",
                    who, from.size(), shown(from), to.size(), shown(to)));
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i].has_value() == to[i].has_value()) continue;
    throw std::invalid_argument(
        fmt::format("{}: tensor {} has {} in {} and {} in {}; give it a layout in both, or std::nullopt in both", who,
                    i, from[i] ? "a layout" : "none", shown(from), to[i] ? "one" : "none", shown(to)));
  }
}

at::Tensor as_dtensor(const at::Tensor& t, const Placement& layout, const HookSite& site, std::size_t i) {
  if (is_dtensor(t)) {
    if (mesh_of(t) == site.mesh) return t;
    throw std::invalid_argument(
        fmt::format("{}: tensor {} is {}, but the module is on {}; redistribute it to that mesh with redistribute_to",
                    site.who, i, to_string(t), site.mesh.to_string()));
  }
  if (!site.data_dims.empty() && !c10::InferenceMode::is_enabled()) {
    throw std::invalid_argument(fmt::format(
        "{}: tensor {} is plain, and on a mesh with data dimensions nobody can know which part of the "
        "batch it is; give from_local(piece, mesh, placements) with Shard(0) on the data dimensions, or, if "
        "it is no part of the batch, std::nullopt as its layout, which leaves it as it is",
        site.who, i));
  }
  const Placements replicated(static_cast<std::size_t>(site.mesh.ndim()), Replicate());
  return from_local(t, site.mesh, on_mesh_dim(replicated, site.tensor_dim, layout, t.dim()));
}

// Trailing nullopt layouts may outnumber the tensors: arguments with defaults may be left out.
void lay_out(std::vector<at::Tensor>& tensors, const Layouts& from, const Layouts& to, bool use_local,
             const HookSite& site) {
  const std::size_t named = static_cast<std::size_t>(
      std::find_if(from.rbegin(), from.rend(), [](const auto& layout) { return layout.has_value(); }).base() -
      from.begin());
  if (tensors.size() > from.size() || tensors.size() < named) {
    throw std::invalid_argument(
        fmt::format("{}: {} layouts {} for {} tensors; give one for every tensor among forward's arguments or results, "
                    "std::nullopt to leave one as it is",
                    site.who, from.size(), shown(from), tensors.size()));
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!from[i] || !tensors[i].defined()) continue;
    const at::Tensor t = as_dtensor(tensors[i], *from[i], site, i);
    const Mesh& mesh = site.mesh.mesh();
    const Placements wanted =
        normalize(on_mesh_dim(placements_of(t), site.tensor_dim, *to[i], t.dim()), mesh, t.dim(), site.who);
    const at::Tensor moved = redistribute(t, fitted_around(site.tensor_dim, wanted, mesh, spec_of(t).sizes));
    tensors[i] = use_local ? to_local(moved) : moved;
  }
}

HookSite site_of(const ApplyContext& context, const std::string& name) {
  return {.who = fmt::format("{} of {}", name, shown_path(context.path())),
          .mesh = context.mesh(),
          .tensor_dim = context.tensor_dim(),
          .data_dims = context.dims_of_parts()};
}

}  // namespace

PrepareModuleInput::PrepareModuleInput(PrepareInputOptions options) : options_(std::move(options)) {
  check_lists("PrepareModuleInput", options_.input_layouts, options_.desired_input_layouts);
}

void PrepareModuleInput::apply(ApplyContext& context) const {
  context.forward_pre_hook(
      [options = options_, site = site_of(context, name())](std::vector<at::Tensor>& inputs) {
        lay_out(inputs, options.input_layouts, options.desired_input_layouts, options.use_local_input, site);
      },
      /*throws_alike=*/true);
}

std::string PrepareModuleInput::to_string() const {
  return fmt::format("PrepareModuleInput({} -> {}{})", shown(options_.input_layouts),
                     shown(options_.desired_input_layouts), options_.use_local_input ? ", local input" : "");
}

PrepareModuleOutput::PrepareModuleOutput(PrepareOutputOptions options) : options_(std::move(options)) {
  check_lists("PrepareModuleOutput", options_.output_layouts, options_.desired_output_layouts);
}

void PrepareModuleOutput::apply(ApplyContext& context) const {
  context.forward_hook(
      [options = options_, site = site_of(context, name())](const std::vector<at::Tensor>&,
                                                            std::vector<at::Tensor>& outputs) {
        lay_out(outputs, options.output_layouts, options.desired_output_layouts, options.use_local_output, site);
      },
      /*throws_alike=*/true);
}

std::string PrepareModuleOutput::to_string() const {
  return fmt::format("PrepareModuleOutput({} -> {}{})", shown(options_.output_layouts),
                     shown(options_.desired_output_layouts), options_.use_local_output ? ", local output" : "");
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareInputOutputOptions options)
    : input_(std::move(options.input)), output_(std::move(options.output)) {}

void PrepareModuleInputOutput::apply(ApplyContext& context) const {
  input_.apply(context);
  output_.apply(context);
}

std::string PrepareModuleInputOutput::to_string() const {
  return fmt::format("PrepareModuleInputOutput({}, {})", input_.to_string(), output_.to_string());
}

}  // namespace tessera

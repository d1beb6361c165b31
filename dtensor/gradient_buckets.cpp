#include "tessera/dtensor/gradient_buckets.h"

#include <iterator>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include "tessera/dtensor/bucket_layouts.h"
#include "tessera/dtensor/bucket_reducer.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient.h"
#include "tessera/mesh/world.h"
#include "tessera/placement/layout.h"

namespace tessera {
namespace {

void check_parameters(const std::vector<BucketedParameter>& parameters) {
  std::set<const void*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].parameter;
    const auto refuse = [i](const std::string& what) {
      throw std::invalid_argument(fmt::format("bucket_gradients: parameter {} {}", i, what));
    };
    if (!is_dtensor(parameter)) refuse("is no DTensor; distribute it over the mesh before");
    const DeviceMesh& mesh = mesh_of(parameters.front().parameter);
    if (mesh_of(parameter) != mesh) {
      refuse(fmt::format("lies on {}, and the first one on {}; call it once for the parameters of each mesh",
                         mesh_of(parameter).to_string(), mesh.to_string()));
    }
    const Placements& gradient = parameters[i].gradient;
    if (std::ssize(gradient) != mesh.ndim() || any_partial(gradient)) {
      refuse(
          fmt::format("is to have a gradient laid out as {}; give {} placements without Partial, since buckets "
                      "reduce what is pending",
                      to_string(gradient), mesh.ndim()));
    }
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) refuse("is listed twice; list it once");
  }
}

std::vector<int64_t> indexes_of(const MeshDims& data_dims, const Mesh& mesh) {
  try {
    return mesh.normalize(data_dims);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(fmt::format("bucket_gradients: data_dims: {}", error.what()));
  }
}

// Says whether the parameter may have a gradient, now or once it requires one.
bool may_have_gradient(const at::Tensor& parameter) {
  if (parameter.requires_grad()) return true;
  const at::ScalarType dtype = parameter.scalar_type();
  return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && !parameter.is_inference();
}

// Gives the parameter's gradients to `reducer`. The hooks for that are made on a parameter that requires a gradient,
// and stay when it does not.
void attach(const at::Tensor& parameter, const std::shared_ptr<BucketReducer>& reducer, std::size_t index) {
  const bool is_frozen = !parameter.requires_grad();
  if (is_frozen) parameter.set_requires_grad(true);
  detail::set_reducer(parameter, reducer, index);
  if (is_frozen) parameter.set_requires_grad(false);
}

}  // namespace

void detail::check_bucket_options(const GradientBucketOptions& options, int64_t mesh_ndim, const std::string& who) {
  if (options.dtype && !c10::isFloatingType(*options.dtype)) {
    throw std::invalid_argument(fmt::format("{}: gradient_buckets.dtype {}; give a floating one, such as bfloat16", who,
                                            c10::toString(*options.dtype)));
  }
  if (options.bucket_bytes < 0) {
    throw std::invalid_argument(
        fmt::format("{}: gradient_buckets.bucket_bytes {}; give 0 or more", who, options.bucket_bytes));
  }
  if (!options.cost_model.links.empty()) check_cost_model(options.cost_model, mesh_ndim, who + ": gradient_buckets");
}

void bucket_gradients(std::vector<BucketedParameter> parameters, const MeshDims& data_dims,
                      const GradientBucketOptions& options) {
  check_parameters(parameters);
  if (parameters.empty()) return;
  const DeviceMesh mesh = mesh_of(parameters.front().parameter);
  const std::vector<int64_t> dims = indexes_of(data_dims, mesh.mesh());
  detail::check_bucket_options(options, mesh.ndim(), "bucket_gradients");
  std::erase_if(parameters, [](const BucketedParameter& each) { return !may_have_gradient(each.parameter); });
  if (parameters.empty() || !mesh.is_member()) return;
  std::vector<BucketLayouts::Parameter> layouts;
  std::vector<at::Tensor> tensors;
  for (BucketedParameter& each : parameters) {
    layouts.push_back({.sizes = each.parameter.sizes().vec(),
                       .dtype = each.parameter.scalar_type(),
                       .layout = normalize(each.gradient, mesh.mesh(), each.parameter.dim(), "bucket_gradients")});
    tensors.push_back(std::move(each.parameter));
  }
  const auto reducer = std::make_shared<BucketReducer>(
      BucketLayouts(mesh, std::move(layouts), options.dtype, options.cost_model), tensors, dims, options.bucket_bytes);
  for (std::size_t i = 0; i < tensors.size(); ++i) attach(tensors[i], reducer, i);
}

AccumulateGradients::AccumulateGradients(const DeviceMesh& mesh) : mesh_(mesh) {
  ++mesh_.world().gradient_accumulations();
}

AccumulateGradients::~AccumulateGradients() { --mesh_.world().gradient_accumulations(); }

}  // namespace tessera

#include "tessera/layers/layer.h"

#include <stdexcept>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/mappings.h"
#include "tessera/mesh/mesh_checks.h"

namespace tessera::detail {
namespace {

SpecPtr wanted_of(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh) {
  return intern_spec(mesh, {use.cut}, use.sizes, parameter.scalar_type());
}

void check_piece(const at::Tensor& piece, const ParameterUse& use, const DeviceMesh& mesh, const char* who) {
  const SpecPtr wanted = wanted_of(piece, use, mesh);
  if (piece.sizes() == at::IntArrayRef(wanted->local_sizes)) return;
  refuse_alone(mesh, who,
               fmt::format("supplied {}'s shape is [{}], not [{}] as expected", use.name,
                           fmt::join(piece.sizes(), ", "), fmt::join(wanted->local_sizes, ", ")));
}

// Returns a DTensor redistributed to the layer's layout.
at::Tensor laid(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh, const char* who) {
  const Spec& spec = spec_of(parameter);
  if (spec.sizes != use.sizes || !(spec.mesh == mesh)) {
    throw std::invalid_argument(fmt::format("{}: supplied {} is {}, not {} as expected", who, use.name, to_string(spec),
                                            to_string(*wanted_of(parameter, use, mesh))));
  }
  return spec.placements.front() == use.cut ? parameter : redistribute(parameter, {use.cut});
}

}  // namespace

at::Tensor own_copy(const at::Tensor& t, const std::optional<at::Device>& device) {
  const at::Tensor values = t.detach();
  const at::Tensor copy = device && values.device() != *device ? values.to(*device) : values.clone();
  return copy.set_requires_grad(t.requires_grad());
}

at::Tensor as_whole(const at::Tensor& used, const at::Tensor* registered,
                    const std::optional<ParameterLayout>& layout) {
  if (is_dtensor(used) || (registered == nullptr ? !layout : !is_dtensor(*registered))) return used;
  const SpecPtr spec = registered == nullptr
                           ? intern_spec(layout->mesh, {layout->cut}, layout->sizes, used.scalar_type())
                           : spec_ptr_of(*registered);
  // A piece of another size fails the job here.
  if (!spec->mesh.is_member() || used.sizes() != at::IntArrayRef(spec->local_sizes)) {
    return from_local(used.detach(), spec->mesh, spec->placements, {.shape = spec->sizes});
  }
  return wrap(used.detach(), spec);
}

at::Tensor whole_parameter(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                           const char* who) {
  const at::Tensor values = parameter.detach();
  return full_tensor(is_dtensor(values) ? values : parameter_on_mesh(values, use, mesh, who));
}

at::Tensor parameter_on_mesh(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                             const char* who) {
  if (is_dtensor(parameter)) return laid(parameter, use, mesh, who);
  check_piece(parameter, use, mesh, who);
  return from_local(parameter, mesh, {use.cut}, {.shape = use.sizes});
}

at::Tensor parameter_piece(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                           const char* who) {
  if (is_dtensor(parameter)) {
    const at::Tensor here = laid(parameter, use, mesh, who);
    return use.gradient ? to_local(here, Placements{*use.gradient}) : to_local(here);
  }
  check_piece(parameter, use, mesh, who);
  // Each rank has a term of the gradient of a parameter that all have as a whole.
  return use.gradient && use.gradient->is_partial() ? copy_to_region(parameter, mesh) : parameter;
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out = sizes.vec();
  out.back() = last;
  return out;
}

template <class Value>
LayerText& LayerText::add(const char* option, const Value& value) {
  text_ += fmt::format("{}{}={}", text_.back() == '(' ? "" : ", ", option, value);
  return *this;
}

template LayerText& LayerText::add(const char* option, const bool& value);
template LayerText& LayerText::add(const char* option, const int64_t& value);
template LayerText& LayerText::add(const char* option, const double& value);
template LayerText& LayerText::add(const char* option, const std::string& value);
template LayerText& LayerText::add(const char* option, const char* const& value);

}  // namespace tessera::detail

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/cloneable.h>

#include "tessera/dtensor/assigned_weight.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// Defines the common base of the named layers, so that LibTorch can copy, print and contain them like its own modules.
namespace tessera {
namespace detail {

// Returns a copy of `t` with its own memory and the same layout, on `device` if given; it is a leaf that requires a
// gradient if `t` does.
at::Tensor own_copy(const at::Tensor& t, const std::optional<at::Device>& device);

// Says how a layer lays out a parameter; `sizes` are those of the whole tensor.
struct ParameterLayout {
  DeviceMesh mesh;
  std::vector<int64_t> sizes;
  Placement cut;
};

// Returns `used`; where it is plain, the DTensor of which it is this rank's piece, with the same memory. That has the
// layout of the registered parameter, if this is a DTensor, or `layout` where none is registered.
at::Tensor as_whole(const at::Tensor& used, const at::Tensor* registered, const std::optional<ParameterLayout>& layout);

// Says how a layer uses a parameter; `sizes` are those of the whole tensor.
struct ParameterUse {
  const char* name;
  std::vector<int64_t> sizes;
  const Placement& cut;
  std::optional<Placement> gradient = std::nullopt;  // placement of the piece's gradient; nullopt: `cut`
};

// A caller may assign another tensor to a layer's parameter, such as another layer's to tie the two. These return the
// parameter that is there now in the form that the layer uses: a DTensor on `mesh`, or this rank's piece. They
// communicate only where a DTensor has another layout, as redistribute does.
// Throws std::invalid_argument on a DTensor of other sizes or on another mesh; a plain piece of other sizes fails the
// job.
at::Tensor parameter_on_mesh(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                             const char* who);
at::Tensor parameter_piece(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                           const char* who);
// Returns its whole value, plain and detached. Communicates as full_tensor.
at::Tensor whole_parameter(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                           const char* who);

// Returns `sizes` with the last one replaced.
std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last);

// Builds "tessera::Name(a=1, b=true)", the form in which LibTorch prints its modules.
class LayerText {
 public:
  explicit LayerText(const char* name) : text_(std::string("tessera::") + name + "(") {}
  // Value is bool, int64_t, double, std::string or const char*.
  template <class Value>
  LayerText& add(const char* option, const Value& value);
  // Adds the option only if it differs from its default, `usual`.
  template <class Value>
  LayerText& add_unless(const Value& usual, const char* option, const Value& value) {
    return value == usual ? *this : add(option, value);
  }
  std::string text() const { return text_ + ")"; }

 private:
  std::string text_;
};

}  // namespace detail

// Names a member of a layer that holds a parameter. A parameter with `registered` false is for the caller to assign;
// `layout` then says what its plain tensor is a piece of.
template <class Class>
struct LayerParameter {
  const char* name;
  at::Tensor Class::*member;
  bool registered = true;
  std::optional<detail::ParameterLayout> layout{};  // GCC 12 fails with an internal error on "= std::nullopt" here
};

// Is the base class of a named layer. `Derived` lists its parameters in a public `layer_parameters() const`; its
// constructor assigns their tensors and then calls reset().
//
// Invariants:
//   - after construction and after clone() every defined member with `registered` set is a parameter that LibTorch
//     knows by the listed name, until a caller assigns another tensor to the member.
template <class Derived>
class Layer : public torch::nn::Cloneable<Derived>, public HasParameters {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;

  std::map<std::string, at::Tensor> member_parameters() const override {
    const auto& self = static_cast<const Derived&>(*this);
    const auto registered = this->named_parameters(/*recurse=*/false);
    std::map<std::string, at::Tensor> members;
    for (const LayerParameter<Derived>& each : self.layer_parameters()) {
      const at::Tensor& used = self.*each.member;
      if (used.defined()) members.emplace(each.name, detail::as_whole(used, registered.find(each.name), each.layout));
    }
    return members;
  }

  // Registers the parameters. In a copy they still share memory with the original's: Cloneable replaces them
  // afterwards.
  void reset() override {
    auto& self = static_cast<Derived&>(*this);
    for (const LayerParameter<Derived>& each : self.layer_parameters()) {
      at::Tensor& tensor = self.*each.member;
      if (!each.registered || !tensor.defined()) continue;
      const bool wants_gradient = tensor.requires_grad();
      tensor = this->register_parameter(each.name, tensor.detach(), wants_gradient);
    }
  }

  // Returns a layer with the same layouts, values and requires_grad, and parameters of its own. A tensor that was
  // assigned to a member is copied too, so the copy is not tied to the other layer. Nothing is drawn at random, and
  // nothing is communicated.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override {
    const auto copy = std::dynamic_pointer_cast<Derived>(torch::nn::Cloneable<Derived>::clone(device));
    const c10::AutoGradMode none(false);
    const auto& self = static_cast<const Derived&>(*this);
    const auto registered = this->named_parameters(/*recurse=*/false);
    for (const LayerParameter<Derived>& each : self.layer_parameters()) {
      const at::Tensor& used = self.*each.member;
      const at::Tensor* const own = registered.find(each.name);
      if (!used.defined() || (own != nullptr && own->is_same(used))) continue;
      at::Tensor& copied = (*copy).*each.member;
      copied = detail::own_copy(used, device);
      if (own != nullptr) copy->parameters_[each.name] = copied;
    }
    return copy;
  }
};

}  // namespace tessera

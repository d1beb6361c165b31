#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/nn/cloneable.h>

#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

// What the named layers share, so that LibTorch copies, prints and contains them as its own.
namespace tessera {
namespace detail {

// A tensor of a layer's own memory with the values and the layout of `t`, on `device` where one is given; a leaf that
// requires a gradient where `t` does.
at::Tensor own_copy(const at::Tensor& t, const std::optional<at::Device>& device);

// How a layer uses a parameter. `sizes` are those of the whole.
struct ParameterUse {
  const char* name;
  std::vector<int64_t> sizes;
  const Placement& cut;
  std::optional<Placement> gradient = std::nullopt;  // of the piece; default: as it is cut
};

// A member of a layer is a tensor that a caller may assign, such as another layer's to tie the two. These give what
// stands there now as the layer uses it: a DTensor on `mesh`, or this rank's piece. Communicates only where a DTensor
// lies otherwise, as redistribute does. Throw std::invalid_argument on a DTensor of other sizes or on another mesh; a
// plain piece of other sizes fails the job.
at::Tensor parameter_on_mesh(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                             const char* who);
at::Tensor parameter_piece(const at::Tensor& parameter, const ParameterUse& use, const DeviceMesh& mesh,
                           const char* who);

// `sizes` with another last one.
std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last);

// "tessera::Name(a=1, b=true)", as LibTorch prints its modules.
class LayerText {
 public:
  explicit LayerText(const char* name) : text_(fmt::format("tessera::{}(", name)) {}
  template <class Value>
  LayerText& add(const char* option, const Value& value) {
    text_ += fmt::format("{}{}={}", text_.back() == '(' ? "" : ", ", option, value);
    return *this;
  }
  // Options that have their default are left out.
  template <class Value>
  LayerText& add_unless(const Value& usual, const char* option, const Value& value) {
    return value == usual ? *this : add(option, value);
  }
  std::string text() const { return text_ + ")"; }

 private:
  std::string text_;
};

}  // namespace detail

// The member of a layer that holds a parameter; a layer may leave one unregistered, for its caller to assign.
template <class Class>
struct LayerParameter {
  const char* name;
  at::Tensor Class::*member;
  bool registered = true;
};

// The base of a named layer. `Derived` lists its parameters in a public `layer_parameters() const`, and its constructor
// gives them their tensors and then calls reset().
template <class Derived>
class Layer : public torch::nn::Cloneable<Derived> {
 public:
  using torch::nn::Cloneable<Derived>::Cloneable;

  // Registers the parameters. Those of a copy still share memory with the original's: Cloneable gives each its own
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

  // A layer with parameters of its own, of the same layouts, values and requires_grad, which computes what this one
  // does: of a member that was assigned it has a copy too, no longer tied to the other layer. Nothing is drawn, and
  // there is no communication.
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

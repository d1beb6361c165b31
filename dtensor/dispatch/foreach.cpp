#include <algorithm>

#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/dtensor/dispatch/dispatcher.h"

namespace tessera::dispatch {
namespace {

// Whether a list operator computes element by element, so that pieces laid out alike give the result's pieces.
bool elementwise(const std::string& key) {
  static const std::vector<std::string> reducing = {"_foreach_norm", "_foreach_max", "_foreach_powsum"};
  return std::find(reducing.begin(), reducing.end(), key) == reducing.end();
}

// The tensors of one list argument, by their place in Call::tensors.
struct List {
  std::size_t arg = 0;
  std::size_t begin = 0;
  std::size_t size = 0;
};

std::vector<List> lists_of(const Call& call) {
  std::vector<List> out;
  for (std::size_t i = 0; i < call.tensors.size(); ++i) {
    if (out.empty() || out.back().arg != call.tensors[i].arg) out.push_back({.arg = call.tensors[i].arg, .begin = i});
    ++out.back().size;
  }
  return out;
}

// A tensor beside the lists, such as a factor, is one number that every rank has.
bool one_number(const TensorArg& entry) {
  return entry.tensor->dim() == 0 && (entry.spec == nullptr || all_replicate(entry.spec->placements));
}

// Every list has, at each place, the same shape and layout as the first, and nothing is pending.
bool aligned(const Call& call, const std::vector<List>& lists) {
  for (const List& list : lists) {
    if (!call.arg(list.arg).isTensorList()) {
      if (!one_number(call.tensors[list.begin])) return false;
      continue;
    }
    if (list.size != lists[0].size) return false;
    for (std::size_t k = 0; k < list.size; ++k) {
      const Spec* first = call.tensors[lists[0].begin + k].spec;
      const Spec* here = call.tensors[list.begin + k].spec;
      if (first == nullptr || here == nullptr || first->partial) return false;
      if (first->sizes != here->sizes || first->placements != here->placements) return false;
    }
  }
  return call.arg(lists[0].arg).isTensorList();
}

at::Tensor local_of(const at::Tensor& t) { return detail::is_dtensor(t) ? detail::meta(t).local() : t; }

}  // namespace

bool run_foreach(const Call& call) {
  const std::vector<List> lists = lists_of(call);
  if (!elementwise(call.traits.key) || !aligned(call, lists)) return false;
  torch::jit::Stack local(call.args().begin(), call.args().end());
  for (const List& list : lists) {
    if (!call.arg(list.arg).isTensorList()) {
      local[list.arg] = local_of(*call.tensors[list.begin].tensor);
      continue;
    }
    c10::List<at::Tensor> pieces;
    pieces.reserve(list.size);
    for (std::size_t k = 0; k < list.size; ++k) pieces.push_back(local_of(*call.tensors[list.begin + k].tensor));
    local[list.arg] = std::move(pieces);
  }
  call.tensors[0].spec->mesh.world().guard(call.traits.name, [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    call.op.callBoxed(local);
  });
  for (at::IValue& value : local) {
    c10::List<at::Tensor> wrapped;
    std::size_t k = 0;
    for (const at::Tensor& t : value.toTensorVector()) {
      const Spec& spec = *call.tensors[lists[0].begin + k++].spec;
      wrapped.push_back(detail::wrap(t, intern_spec(spec.mesh, spec.placements, spec.sizes, spec.strides, t.scalar_type())));
    }
    value = std::move(wrapped);
  }
  call.stack.resize(call.base);
  for (at::IValue& value : local) call.stack.push_back(std::move(value));
  return true;
}

}  // namespace tessera::dispatch

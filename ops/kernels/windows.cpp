#include "tessera/ops/kernels/windows.h"

#include <algorithm>

#include <ATen/ops/constant_pad_nd.h>

namespace tessera {

std::vector<WindowRows> window_rows(const LocalCall& call) {
  std::vector<WindowRows> out;
  if (call.fetched == nullptr) return out;
  const rules::Halos& halos = call.fetched->halos;
  const Tile& held = call.inputs[halos.inputs[0]]->tile;
  const Tile& computed = halos.anchor ? call.inputs[*halos.anchor]->tile : call.outputs[0]->tile;
  for (std::size_t k = 0; k < halos.dims.size(); ++k) {
    const auto d = static_cast<std::size_t>(halos.dims[k]);
    const Interval rows = rules::hull(computed[d]);
    const Interval met = halos.needed(k, held[d], computed[d]);
    const rules::Window& window = halos.windows[k];
    const Interval narrow = halos.wide ? rows : met;
    const bool whole = rows.size() == halos.computed_size(k) && met.size() == halos.fetched_size(k);
    out.push_back({.dim = halos.dims[k],
                   .window = window,
                   .wide = halos.wide ? met : rows,
                   .narrow = narrow,
                   .span = window.span(narrow),
                   .whole = whole});
  }
  return out;
}

bool no_rows(const std::vector<WindowRows>& rows) {
  return std::ranges::any_of(rows, [](const WindowRows& r) { return r.wide.size() == 0 || r.narrow.size() == 0; });
}

at::Tensor reframed(const at::Tensor& t, const std::vector<WindowRows>& rows, Interval WindowRows::*from,
                    Interval WindowRows::*to, const at::Scalar& value) {
  std::vector<int64_t> amounts(static_cast<std::size_t>(2 * t.dim()), 0);  // the last dimension comes first
  for (const WindowRows& r : rows) {
    const auto at = static_cast<std::size_t>(2 * (t.dim() - 1 - r.dim));
    amounts[at] = (r.*from).begin - (r.*to).begin;
    amounts[at + 1] = (r.*to).end - (r.*from).end;
  }
  if (std::ranges::all_of(amounts, [](int64_t amount) { return amount == 0; })) return t;
  return at::constant_pad_nd(t, amounts, value);
}

at::IValue& named(const LocalCall& call, torch::jit::Stack& stack, std::string_view name) {
  return stack[static_cast<std::size_t>(call.op.schema().argumentIndexWithName(name).value())];
}

}  // namespace tessera

#include <ATen/ATen.h>

#include "tessera/tests/ops/rules/made_tensors.h"
#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

// No index occurs twice, since the order would decide which of two elements is written.
at::Tensor distinct(int64_t count, int64_t below) { return at::randperm(below, at::kLong).narrow(0, 0, count); }
at::IValue list(std::vector<at::Tensor> tensors) { return c10::List<at::Tensor>(tensors); }

at::IValue indices(const std::vector<at::Tensor>& tensors) {
  c10::List<std::optional<at::Tensor>> out;
  for (const at::Tensor& t : tensors) out.push_back(t.defined() ? std::make_optional(t) : std::nullopt);
  return out;
}

}  // namespace

std::vector<Sample> join_samples() {
  return {
      {"aten::tril", {x({5, 3, 4}), 1}},
      {"aten::triu", {x({5, 4})}},
      {"aten::tril_", {x({4, 5}), -1}},
      {"aten::constant_pad_nd", {x({5, 3}), Ints{1, 2}}},
      {"aten::constant_pad_nd", {x({5, 3}), Ints{0, 0, -1, 2}, 1.5}},
      {"aten::cat", {list({x({5, 2}), x({5, 3})}), 1}},
      {"aten::cat", {list({x({5, 2}), x({0})}), 0}},
      {"aten::cat", {list({x({5, 2}), ints({1, 2}, 9)}), 0}},
      {"aten::stack", {list({x({5, 2}), x({5, 2}), x({5, 2})}), -1}},
      {"aten::slice_scatter", {x({5, 6}), x({5, 2}), 1, 1, 5, 2}},
      {"aten::select_scatter", {x({5, 4}), x({5}), 1, 2}},
      {"aten::repeat", {x({5, 3}), Ints{2, 1, 2}}},
      {"aten::repeat", {x({5, 3}), Ints{1, 1}}},
      {"aten::diag_embed", {x({5, 3})}},
      {"aten::diag_embed", {x({5, 2, 3}), 1, 0, 2}},
      {"aten::diagonal_scatter", {x({5, 3, 4}), x({5, 3}), 0, 1, 2}},
  };
}

std::vector<Sample> indexing_samples() {
  const at::Tensor none;
  const at::Tensor some = ints({4, 2}, 3);
  const at::Tensor mask = bools({5, 3});
  const at::Tensor places = at::rand({5, 3}).argsort(/*stable=*/true, 1);
  return {
      {"aten::index_select", {x({5, 3}), 0, ints({7}, 5)}},
      {"aten::index_select", {x({5, 3, 2}), 0, ints({2}, 5)}},
      {"aten::index_select", {x({3, 7}), -1, ints({3}, 7)}},
      {"aten::gather", {x({5, 3}), -1, ints({4, 1}, 3)}},
      {"aten::gather", {x({5, 3}), 1, ints({5, 4}, 3)}},
      {"aten::gather", {x({5, 3}), 0, ints({4, 2}, 5)}},
      {"aten::index_add", {x({5, 3}), 0, ints({7}, 5), x({7, 3}), 2}},
      {"aten::index_add_", {x({5, 3}), 1, ints({4}, 3), x({5, 4})}},
      {"aten::index_copy", {x({5, 3}), 0, distinct(3, 5), x({3, 3})}},
      {"aten::index_copy_", {x({5, 4}), 1, distinct(2, 4), x({5, 2})}},
      {"aten::index_reduce", {x({5, 3}), 0, ints({7}, 5), x({7, 3}), "prod"}},
      {"aten::index_reduce", {x({5, 3}), 1, ints({4}, 3), x({5, 4}), "mean", false}},
      {"aten::index_fill.int_Scalar", {x({5, 3}), 0, distinct(2, 5), 2.5}},
      {"aten::index_fill_.int_Tensor", {x({5, 3}), 1, distinct(2, 3), x({})}},
      {"aten::scatter.src", {x({5, 3}), 1, places, x({5, 3})}},
      {"aten::scatter.src", {x({5, 4}), 0, ints({1, 4}, 5), x({3, 4})}},
      {"aten::scatter_.value", {x({5, 3}), 1, ints({5, 2}, 3), 2.0}},
      {"aten::scatter.reduce", {x({5, 3}), 1, places, x({5, 3}), "add"}},
      {"aten::scatter.value_reduce", {x({5, 3}), 1, places, 2.0, "multiply"}},
      {"aten::scatter_add", {x({5, 3}), 1, ints({5, 7}, 3), x({5, 7})}},
      {"aten::scatter_add_", {x({5, 3}), 0, ints({7, 3}, 5), x({7, 3})}},
      {"aten::scatter_add", {x({5, 3}), 0, ints({2, 3}, 5), x({4, 3})}},
      {"aten::scatter_reduce.two", {x({5, 3}), 1, ints({5, 7}, 3), x({5, 7}), "sum"}},
      {"aten::scatter_reduce.two", {x({5, 3}), 1, ints({5, 7}, 3), x({5, 7}), "amax"}},
      {"aten::scatter_reduce.two", {x({5, 3}), 1, ints({5, 7}, 3), x({5, 7}), "mean", false}},
      {"aten::index.Tensor", {x({5, 3, 2}), indices({ints({4}, 5)})}},
      {"aten::index.Tensor", {x({5, 3, 2}), indices({none, some})}},
      {"aten::index.Tensor", {x({5, 3, 2}), indices({ints({4, 1}, 5), some})}},
      {"aten::index.Tensor", {x({5, 3, 2}), indices({ints({4}, 5), none, ints({4}, 2)})}},
      {"aten::index.Tensor", {x({5, 3}), indices({mask})}},
      {"aten::index.Tensor", {x({5, 3, 4}), indices({ints({2}, 5) - 5})}},
      {"aten::index.Tensor", {x({5, 3, 4}), indices({none, ints({2, 1}, 3), ints({3}, 4)})}},
      {"aten::index.Tensor", {x({5, 3, 4}), indices({ints({3}, 5), none, ints({3}, 4) - 4})}},
      {"aten::_unsafe_index.Tensor", {x({5, 3, 2}), indices({none, some})}},
      {"aten::index_put", {x({5, 3, 2}), indices({distinct(4, 5)}), x({4, 3, 2})}},
      {"aten::index_put", {x({5, 3, 2}), indices({none, distinct(2, 3)}), x({2, 2})}},
      {"aten::index_put_", {x({5, 3}), indices({ints({7}, 5)}), x({7, 3}), true}},
      {"aten::index_put_", {x({5, 3}), indices({ints({7}, 5), ints({7}, 3)}), x({}), true}},
      {"aten::index_put_", {x({5, 3}), indices({mask}), x({})}},
      {"aten::index_put", {x({5, 3}), indices({mask}), x({1})}},
      {"aten::_index_put_impl_", {x({5, 3}), indices({ints({4, 2}, 5)}), x({4, 2, 3}), true}},
      {"aten::_unsafe_index_put", {x({5, 3, 2}), indices({none, distinct(2, 3)}), x({5, 2, 2})}},
      {"aten::index_put", {x({5, 3, 4}), indices({ints({3}, 5) - 5, none, ints({3}, 4)}), x({3, 1}), true}},
      {"aten::index_put_", {x({5, 4}), indices({none, distinct(3, 4) - 4}), x({5, 3})}},
  };
}

std::vector<Sample> norm_samples() {
  const at::Tensor input = x({5, 3, 4});
  const auto [result, mean, rstd] = at::native_layer_norm(input, {4}, x({4}), x({4}), 1e-5);
  const at::IValue all = c10::List<bool>({true, true, true});
  const at::IValue some = c10::List<bool>({true, false, false});
  const at::Tensor image = x({5, 6, 2, 2});
  const auto [grouped, group_mean, group_rstd] = at::native_group_norm(image, x({6}), x({6}), 5, 6, 4, 3, 1e-5);
  const at::Tensor positive = at::rand({6}, at::kDouble) + 0.5;
  return {
      {"aten::native_layer_norm", {input, Ints{4}, x({4}), x({4}), 1e-5}},
      {"aten::native_layer_norm", {input, Ints{3, 4}, at::IValue(), at::IValue(), 1e-5}},
      {"aten::native_layer_norm_backward", {x({5, 3, 4}), input, Ints{4}, mean, rstd, x({4}), x({4}), all}},
      {"aten::native_layer_norm_backward", {x({5, 3, 4}), input, Ints{4}, mean, rstd, x({4}), x({4}), some}},
      {"aten::_fused_rms_norm", {input, Ints{4}, x({4}), 1e-5}},
      {"aten::native_group_norm", {image, x({6}), x({6}), 5, 6, 4, 3, 1e-5}},
      {"aten::native_group_norm", {image, at::IValue(), at::IValue(), 5, 6, 4, 1, 1e-5}},
      {"aten::native_group_norm_backward", {x({5, 6, 2, 2}), image, group_mean, group_rstd, x({6}), 5, 6, 4, 3, all}},
      {"aten::native_group_norm_backward", {x({5, 6, 2, 2}), image, group_mean, group_rstd, x({6}), 5, 6, 4, 3, some}},
      {"aten::native_batch_norm", {image, x({6}), x({6}), x({6}), positive, false, 0.1, 1e-5}},
      {"aten::native_batch_norm", {image, x({6}), x({6}), x({6}), positive, true, 0.1, 1e-5}},
      {"aten::_native_batch_norm_legit", {image, x({6}), x({6}), x({6}), positive, false, 0.1, 1e-5}},
      {"aten::_native_batch_norm_legit_no_training", {image, x({6}), x({6}), x({6}), positive, 0.1, 1e-5}},
      {"aten::renorm", {x({5, 3, 2}), 2, 0, 1.5}},
      {"aten::renorm_", {x({5, 3, 2}), 1, -1, 1.5}},
      {"aten::_weight_norm_interface", {x({5, 3, 2}), x({5, 1, 1})}},
      {"aten::_weight_norm_interface", {x({4, 3, 5}), x({1, 1, 5}), 2}},
  };
}

}  // namespace tessera::testing

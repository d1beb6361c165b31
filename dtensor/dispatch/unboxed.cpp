#include "tessera/dtensor/dispatch/unboxed.h"

#include <string>
#include <unordered_map>

#include <ATen/ops/_foreach_abs_ops.h>
#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_addcdiv_ops.h>
#include <ATen/ops/_foreach_addcmul_ops.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/_foreach_div_ops.h>
#include <ATen/ops/_foreach_exp_ops.h>
#include <ATen/ops/_foreach_lerp_ops.h>
#include <ATen/ops/_foreach_maximum_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_foreach_neg_ops.h>
#include <ATen/ops/_foreach_reciprocal_ops.h>
#include <ATen/ops/_foreach_sqrt_ops.h>
#include <ATen/ops/_foreach_sub_ops.h>
#include <ATen/ops/_foreach_zero_ops.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcdiv_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/alias_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/expand_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/lerp_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/minimum_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/ones_like_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/reciprocal_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/select_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/split_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/squeeze_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/view_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>
#include <ATen/ops/zeros_like_ops.h>

#include "tessera/mesh/failing.h"

namespace tessera::dispatch {
namespace {

namespace aten = at::_ops;

using Make = c10::KernelFunction (*)(const c10::OperatorHandle& op);

using Table = std::unordered_map<std::string, Make>;

template <template <class...> class Kernel, class... Ops>
void add(Table& table) {
  (table.emplace(std::string(Ops::name) + "." + Ops::overload_name, &make_unboxed<Kernel<Ops, typename Ops::schema>>),
   ...);
}

// Lists the operators that models and optimizers call most. Any whose argument types unboxed.h handles may be added; a
// list operator only if it computes element by element and has no decomposition.
Table make_table() {
  Table table;
  add<Unboxed, aten::add_Tensor, aten::add_Scalar, aten::add__Tensor, aten::add__Scalar, aten::sub_Tensor,
      aten::sub_Scalar, aten::sub__Tensor, aten::sub__Scalar, aten::mul_Tensor, aten::mul_Scalar, aten::mul__Tensor,
      aten::mul__Scalar, aten::div_Tensor, aten::div_Scalar, aten::div__Tensor, aten::div__Scalar, aten::addcmul,
      aten::addcmul_, aten::addcdiv, aten::addcdiv_, aten::lerp_Scalar, aten::lerp__Scalar, aten::neg, aten::neg_,
      aten::sqrt, aten::sqrt_, aten::rsqrt, aten::exp, aten::exp_, aten::log, aten::abs, aten::reciprocal,
      aten::sigmoid, aten::sigmoid_, aten::tanh, aten::tanh_, aten::relu, aten::relu_, aten::silu, aten::gelu,
      aten::where_self, aten::maximum, aten::minimum, aten::clamp, aten::clamp_, aten::sigmoid_backward,
      aten::tanh_backward, aten::silu_backward, aten::gelu_backward, aten::threshold_backward, aten::mm, aten::bmm,
      aten::addmm, aten::t, aten::view, aten::_unsafe_view, aten::detach, aten::transpose_int, aten::permute,
      aten::expand, aten::unsqueeze, aten::squeeze_dim, aten::select_int, aten::slice_Tensor, aten::alias, aten::clone,
      aten::_to_copy, aten::copy_, aten::zero_, aten::fill__Scalar, aten::sum, aten::sum_dim_IntList, aten::mean,
      aten::mean_dim, aten::cat, aten::native_layer_norm, aten::native_layer_norm_backward, aten::_softmax,
      aten::_softmax_backward_data, aten::_log_softmax, aten::_log_softmax_backward_data,
      aten::_scaled_dot_product_flash_attention_for_cpu, aten::_scaled_dot_product_flash_attention_for_cpu_backward,
      aten::embedding, aten::pow_Tensor_Scalar, aten::split_Tensor, aten::ones_like, aten::zeros_like>(table);
  add<UnboxedList, aten::_foreach_add_List, aten::_foreach_add__List, aten::_foreach_add_Scalar,
      aten::_foreach_add__Scalar, aten::_foreach_add_ScalarList, aten::_foreach_add__ScalarList,
      aten::_foreach_sub_List, aten::_foreach_sub__List, aten::_foreach_sub_Scalar, aten::_foreach_sub__Scalar,
      aten::_foreach_sub_ScalarList, aten::_foreach_sub__ScalarList, aten::_foreach_mul_List, aten::_foreach_mul__List,
      aten::_foreach_mul_Scalar, aten::_foreach_mul__Scalar, aten::_foreach_mul_ScalarList,
      aten::_foreach_mul__ScalarList, aten::_foreach_div_List, aten::_foreach_div__List, aten::_foreach_div_Scalar,
      aten::_foreach_div__Scalar, aten::_foreach_div_ScalarList, aten::_foreach_div__ScalarList,
      aten::_foreach_addcmul_Scalar, aten::_foreach_addcmul__Scalar, aten::_foreach_addcmul_ScalarList,
      aten::_foreach_addcmul__ScalarList, aten::_foreach_addcdiv_Scalar, aten::_foreach_addcdiv__Scalar,
      aten::_foreach_addcdiv_ScalarList, aten::_foreach_addcdiv__ScalarList, aten::_foreach_sqrt, aten::_foreach_sqrt_,
      aten::_foreach_neg, aten::_foreach_neg_, aten::_foreach_exp, aten::_foreach_exp_, aten::_foreach_abs,
      aten::_foreach_abs_, aten::_foreach_reciprocal, aten::_foreach_reciprocal_, aten::_foreach_zero_,
      aten::_foreach_lerp_Scalar, aten::_foreach_lerp__Scalar, aten::_foreach_copy_, aten::_foreach_maximum_List,
      aten::_foreach_maximum__List>(table);
  return table;
}

}  // namespace

void rethrow_on_pieces(bool ranks_differ, World& world, const std::string& name) {
  if (ranks_differ) rethrow_failing(world, name.c_str());
  rethrow_failing_if_own(world, name.c_str());
}

std::optional<c10::KernelFunction> unboxed_kernel(const c10::OperatorHandle& op) {
  static const Table table = make_table();
  const auto found = table.find(op.operator_name().name + "." + op.operator_name().overload_name);
  return found == table.end() ? std::nullopt : std::make_optional(found->second(op));
}

}  // namespace tessera::dispatch

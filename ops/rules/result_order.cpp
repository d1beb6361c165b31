#include "tessera/ops/rules/result_order.h"

#include <algorithm>
#include <array>

namespace tessera::rules {

bool gives_row_major(std::string_view name) {
  static constexpr std::array<std::string_view, 12> kNames = {"aten::_logcumsumexp",
                                                              "aten::_safe_softmax",
                                                              "aten::cummax",
                                                              "aten::cummin",
                                                              "aten::huber_loss_backward",
                                                              "aten::index_select",
                                                              "aten::logcumsumexp",
                                                              "aten::mse_loss_backward",
                                                              "aten::native_layer_norm",
                                                              "aten::native_layer_norm_backward",
                                                              "aten::smooth_l1_loss_backward",
                                                              "aten::take"};
  return std::ranges::binary_search(kNames, name);
}

}  // namespace tessera::rules

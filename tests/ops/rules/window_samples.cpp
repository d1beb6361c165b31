#include <ATen/ATen.h>

#include "tessera/tests/ops/rules/made_tensors.h"
#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

struct Options {
  Ints stride = {1};
  Ints padding = {0};
  Ints dilation = {1};
  bool transposed = false;
  Ints output_padding = {0};
  int64_t groups = 1;
};

// Adds the operator and its backward; with `parts`, also without a bias, and with each gradient alone.
void add(std::vector<Sample>& out, const Ints& input_sizes, const Ints& weight_sizes, const Options& o,
         bool parts = false) {
  const at::Tensor input = x(input_sizes);
  const at::Tensor weight = x(weight_sizes);
  const Ints channels = {o.transposed ? weight_sizes[1] * o.groups : weight_sizes[0]};
  const auto forward = [&](const at::IValue& bias) {
    out.push_back({"aten::convolution",
                   {input, weight, bias, o.stride, o.padding, o.dilation, o.transposed, o.output_padding, o.groups}});
  };
  const at::Tensor grad = at::randn_like(at::convolution(input, weight, x(channels), o.stride, o.padding, o.dilation,
                                                         o.transposed, o.output_padding, o.groups));
  const auto backward = [&](bool of_input, bool of_weight, bool of_bias) {
    out.push_back({"aten::convolution_backward",
                   {grad, input, weight, channels, o.stride, o.padding, o.dilation, o.transposed, o.output_padding,
                    o.groups, c10::List<bool>({of_input, of_weight, of_bias})}});
  };
  forward(x(channels));
  backward(true, true, true);
  if (!parts) return;
  forward(none());
  backward(true, false, false);
  backward(false, true, false);
  backward(false, false, true);
}

// Adds the operator's samples on an image of `sizes`, and those of its backward.
void add_maxima(std::vector<Sample>& out, const Ints& sizes, const Ints& kernel, const Ints& stride,
                const Ints& padding, const Ints& dilation, bool ceil_mode) {
  const at::Tensor image = x(sizes);
  const std::string dims = kernel.size() == 2 ? "2d" : "3d";
  const auto [most, where] = kernel.size() == 2
                                 ? at::max_pool2d_with_indices(image, kernel, stride, padding, dilation, ceil_mode)
                                 : at::max_pool3d_with_indices(image, kernel, stride, padding, dilation, ceil_mode);
  const std::string name = "aten::max_pool" + dims + "_with_indices";
  out.push_back({name, {image, kernel, stride, padding, dilation, ceil_mode}});
  out.push_back(
      {name + "_backward", {at::randn_like(most), image, kernel, stride, padding, dilation, ceil_mode, where}});
}

void add_means(std::vector<Sample>& out, const Ints& sizes, const Ints& kernel, const Ints& stride, const Ints& padding,
               bool ceil_mode, bool count_padding, const at::IValue& divisor) {
  const at::Tensor image = x(sizes);
  const auto over = divisor.toOptional<int64_t>();
  const at::Tensor mean = kernel.size() == 2
                              ? at::avg_pool2d(image, kernel, stride, padding, ceil_mode, count_padding, over)
                              : at::avg_pool3d(image, kernel, stride, padding, ceil_mode, count_padding, over);
  const std::string name = kernel.size() == 2 ? "aten::avg_pool2d" : "aten::avg_pool3d";
  out.push_back({name, {image, kernel, stride, padding, ceil_mode, count_padding, divisor}});
  out.push_back(
      {name + "_backward", {at::randn_like(mean), image, kernel, stride, padding, ceil_mode, count_padding, divisor}});
}

}  // namespace

std::vector<Sample> convolution_samples() {
  std::vector<Sample> out;
  add(out, {5, 2, 6}, {3, 2, 3}, {}, /*parts=*/true);
  add(out, {5, 2, 6}, {3, 2, 3}, {.padding = {1}});
  add(out, {2, 3, 11}, {2, 3, 3}, {.stride = {2}, .padding = {1}});
  add(out, {2, 3, 11}, {2, 3, 4}, {.padding = {2}, .dilation = {3}});
  add(out, {2, 3, 11}, {2, 3, 2}, {.stride = {4}});  // rows that no window uses
  add(out, {2, 3, 5}, {2, 3, 5}, {.padding = {4}});  // a kernel larger than a piece
  add(out, {2, 3, 4}, {2, 3, 1}, {.padding = {2}});  // windows that contain only padding
  add(out, {2, 3, 7, 5}, {4, 3, 3, 2}, {.stride = {2, 1}, .padding = {1, 0}, .dilation = {1, 2}});
  add(out, {2, 2, 3, 4, 3}, {2, 2, 2, 3, 2}, {.stride = {1}, .padding = {1}});
  add(out, {3, 8, 7}, {12, 2, 3}, {.padding = {1}, .groups = 4});
  add(out, {3, 6, 5}, {6, 1, 3}, {.stride = {2}, .padding = {1}, .groups = 6});
  add(out, {2, 3, 6}, {3, 2, 3}, {.transposed = true}, /*parts=*/true);
  add(out, {2, 3, 6}, {3, 2, 3}, {.stride = {2}, .padding = {1}, .transposed = true, .output_padding = {1}});
  add(out, {2, 3, 6}, {3, 2, 2}, {.stride = {4}, .transposed = true, .output_padding = {3}});  // rows of bias alone
  add(out, {2, 3, 5, 4}, {3, 4, 3, 2}, {.stride = {2, 3}, .padding = {2, 0}, .dilation = {2, 1}, .transposed = true});
  add(out, {2, 8, 5}, {8, 3, 3}, {.stride = {2}, .transposed = true, .groups = 4});
  out.push_back(
      {"aten::_convolution",
       {x({2, 3, 7}), x({2, 3, 3}), x({2}), Ints{2}, Ints{1}, Ints{1}, false, Ints{0}, 1, false, false, true, true}});
  return out;
}

std::vector<Sample> pooling_samples() {
  std::vector<Sample> out;
  add_maxima(out, {3, 5, 6, 4}, {2, 2}, {2, 2}, {0, 0}, {1, 1}, false);
  add_maxima(out, {3, 7, 5}, {3, 2}, {1, 2}, {1, 0}, {1, 1}, true);
  add_maxima(out, {2, 3, 11, 9}, {3, 3}, {2, 1}, {1, 1}, {2, 3}, true);
  add_maxima(out, {2, 3, 9, 9}, {2, 5}, {3, 3}, {0, 2}, {1, 1}, false);
  add_maxima(out, {3, 2, 4, 4, 5}, {2, 2, 2}, {2, 1, 2}, {0, 1, 0}, {1, 1, 2}, true);
  add_means(out, {3, 5, 6, 4}, {2, 2}, {}, {0, 0}, false, true, none());
  add_means(out, {3, 7, 5}, {3, 2}, {2, 2}, {1, 0}, true, true, none());
  add_means(out, {2, 3, 10, 9}, {3, 3}, {2, 1}, {1, 1}, true, false, none());
  add_means(out, {2, 3, 9, 9}, {2, 5}, {3, 3}, {0, 2}, false, true, 7);
  add_means(out, {3, 2, 4, 4, 5}, {2, 2, 3}, {2, 1, 2}, {0, 1, 1}, true, false, none());
  add_means(out, {3, 2, 4, 4, 5}, {2, 2, 3}, {2, 1, 2}, {0, 1, 1}, true, true, none());
  const at::Tensor none_larger = at::full({2, 3, 8, 4}, -std::numeric_limits<double>::infinity(), at::kDouble);
  out.push_back(
      {"aten::max_pool2d_with_indices", {none_larger, Ints{3, 3}, Ints{1, 1}, Ints{1, 1}, Ints{2, 2}, false}});
  out.push_back({"aten::max_pool2d_with_indices",
                 {at::randint(-9, 9, {2, 3, 7, 4}, at::kLong), Ints{3, 2}, Ints{2, 1}, Ints{1, 1}}});
  out.push_back(
      {"aten::avg_pool2d", {at::randint(-9, 9, {2, 3, 7, 4}, at::kLong), Ints{3, 2}, Ints{2, 1}, Ints{1, 1}}});
  return out;
}

}  // namespace tessera::testing

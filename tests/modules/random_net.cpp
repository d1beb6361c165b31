#include "tessera/tests/modules/random_net.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <tuple>

#include <torch/nn.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/layers/activation_checkpoint.h"
#include "tessera/tests/dtensor/values.h"

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using Tensor = at::Tensor;
using Step = void (*)(RandomNetImpl& net, NetShape& s, Random& random);

// LibTorch's kernels for the backward of these norms on CPUs are wrong, and may read outside of memory, where image and
// gradient do not lie in one order: plain tensors are laid out for them.
template <class Norm>
Tensor normed(Norm& norm, const Tensor& x) {
  if (is_dtensor(x)) return norm(x);
  const Tensor y = norm(x.contiguous());
  if (y.requires_grad()) y.register_hook([](const Tensor& g) { return g.contiguous(); });
  return y;
}

// ---- Images

void convolution(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t kernel = 1 + pick(r, 3), stride = 1 + pick(r, 2), padding = pick(r, 2), dilation = 1 + pick(r, 4) / 3;
  const auto size = [&](int64_t n) { return (n + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1; };
  if (std::min(s.height, s.width) + 2 * padding < dilation * (kernel - 1) + 1) return;
  const int64_t groups = chance(r, 3) ? s.features : 1;
  const int64_t made = groups == 1 ? 1 + pick(r, 6) : s.features * (1 + pick(r, 2));
  auto options = nn::Conv2dOptions(s.features, made, kernel).stride(stride).padding(padding).dilation(dilation);
  if (chance(r, 6)) options.padding_mode(torch::kCircular);
  if (chance(r, 6)) options.padding_mode(torch::kReplicate);
  net.add(fmt::format("Conv2d({}, {}, kernel {}, stride {}, padding {}, dilation {}, groups {})", s.features, made,
                      kernel, stride, padding, dilation, groups),
          nn::Conv2d(options.groups(groups).bias(chance(r, 2))));
  s = {true, s.batch, made, size(s.height), size(s.width)};
}

void transposed_convolution(RandomNetImpl& net, NetShape& s, Random& r) {
  if (s.height * s.width > 100) return;
  const int64_t made = 1 + pick(r, 5);
  net.add(fmt::format("ConvTranspose2d({}, {})", s.features, made),
          nn::ConvTranspose2d(nn::ConvTranspose2dOptions(s.features, made, 2).stride(2)));
  s = {true, s.batch, made, 2 * s.height, 2 * s.width};
}

void batch_norm(RandomNetImpl& net, NetShape& s, Random& r) {
  if (s.batch * s.height * s.width < 2) return;
  const auto options = nn::BatchNorm2dOptions(s.features).affine(!chance(r, 4)).track_running_stats(!chance(r, 4));
  net.add("BatchNorm2d", nn::BatchNorm2d(options), normed<nn::BatchNorm2d>);
}

void group_norm(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t groups = s.features % 2 == 0 && chance(r, 2) ? 2 : 1;
  net.add(fmt::format("GroupNorm({}, {})", groups, s.features), nn::GroupNorm(groups, s.features),
          normed<nn::GroupNorm>);
}

void instance_norm(RandomNetImpl& net, NetShape& s, Random& r) {
  if (s.height * s.width < 2) return;
  const auto options = nn::InstanceNorm2dOptions(s.features).affine(chance(r, 2)).track_running_stats(chance(r, 3));
  net.add("InstanceNorm2d", nn::InstanceNorm2d(options), normed<nn::InstanceNorm2d>);
}

void pool(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t stride = 1 + pick(r, 2);
  if (s.height < 2 || s.width < 2) return;
  if (chance(r, 2)) {
    net.add(fmt::format("MaxPool2d(stride {})", stride), nn::MaxPool2d(nn::MaxPool2dOptions(2).stride(stride)));
  } else {
    net.add(fmt::format("AvgPool2d(stride {})", stride), nn::AvgPool2d(nn::AvgPool2dOptions(2).stride(stride)));
  }
  s.height = (s.height - 2) / stride + 1;
  s.width = (s.width - 2) / stride + 1;
}

void resize(RandomNetImpl& net, NetShape& s, Random& r) {
  if (s.height * s.width > 100 || chance(r, 2)) {
    s.height = 1 + pick(r, 4);
    s.width = 1 + pick(r, 4);
    net.add(fmt::format("AdaptiveAvgPool2d({}, {})", s.height, s.width),
            nn::AdaptiveAvgPool2d(std::vector<int64_t>{s.height, s.width}));
    return;
  }
  auto options = nn::UpsampleOptions().scale_factor(std::vector<double>{2, 2});
  if (chance(r, 2)) options.mode(torch::kBilinear).align_corners(false);
  net.add("Upsample", nn::Upsample(options));
  s.height *= 2;
  s.width *= 2;
}

void squeeze_and_excite(RandomNetImpl& net, NetShape& s, Random& /*r*/) {
  net.add(fmt::format("excite({})", s.features), nn::Linear(s.features, s.features), [](auto& m, const Tensor& x) {
    return x * at::sigmoid(m(x.mean(at::IntArrayRef{2, 3}))).unsqueeze(-1).unsqueeze(-1);
  });
}

void of_pixels(RandomNetImpl& net, NetShape& s, Random& r) {
  switch (pick(r, 4)) {
    case 0: return net.add("PReLU", nn::PReLU(nn::PReLUOptions().num_parameters(s.features)));
    case 1: return net.compute("x + gelu(x)", [](const Tensor& x) { return x + at::gelu(x); });
    case 2: return net.compute("softmax(1)", [](const Tensor& x) { return x.softmax(1); });
    default: break;
  }
  net.add("pad", nn::ZeroPad2d(nn::ZeroPad2dOptions({1, 0, 2, 1})));
  s.height += 3;
  s.width += 1;
}

void join_features(RandomNetImpl& net, NetShape& s, Random& /*r*/) {
  if (s.features > 8) return;
  net.compute("cat", [](const Tensor& x) { return at::cat({x, x.tanh()}, 1); });
  s.features *= 2;
}

void to_sequence(RandomNetImpl& net, NetShape& s, Random& /*r*/) {
  net.compute("pixels", [](const Tensor& x) { return x.flatten(2).transpose(1, 2); });
  s = {false, s.batch, s.features, s.height * s.width, 1};
}

constexpr Step kOfImages[] = {
    convolution, convolution, transposed_convolution, batch_norm,    batch_norm, group_norm, instance_norm,
    pool,        resize,      squeeze_and_excite,     join_features, of_pixels,  to_sequence};

// ---- Sequences

void recurrent(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t hidden = 1 + pick(r, 5);
  const bool both = chance(r, 3);
  const std::string sizes = fmt::format("({}, {}{})", s.features, hidden, both ? ", both ways" : "");
  if (chance(r, 2)) {
    const auto options = nn::LSTMOptions(s.features, hidden).num_layers(1 + pick(r, 2)).batch_first(true);
    net.add("LSTM" + sizes, nn::LSTM(nn::LSTMOptions(options).bidirectional(both)),
            [](auto& m, const Tensor& x) { return std::get<0>(m(x)); });
  } else {
    net.add("GRU" + sizes, nn::GRU(nn::GRUOptions(s.features, hidden).bidirectional(both)),
            [](auto& m, const Tensor& x) { return std::get<0>(m(x.transpose(0, 1))).transpose(0, 1); });
  }
  s.features = both ? 2 * hidden : hidden;
}

void attention(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t heads = s.features % 3 == 0 ? 3 : s.features % 2 == 0 ? 2 : 1;
  const std::string sizes = fmt::format("({}, {})", s.features, heads);
  switch (pick(r, 3)) {
    case 0:
      net.add("MultiheadAttention" + sizes,
              nn::MultiheadAttention(nn::MultiheadAttentionOptions(s.features, heads).add_bias_kv(chance(r, 4))),
              [](auto& m, const Tensor& x) {
                const Tensor t = x.transpose(0, 1);
                return x + std::get<0>(m(t, t, t)).transpose(0, 1);
              });
      break;
    case 1:
      net.add("TransformerEncoderLayer" + sizes,
              nn::TransformerEncoderLayer(
                  nn::TransformerEncoderLayerOptions(s.features, heads).dim_feedforward(1 + pick(r, 9)).dropout(0)),
              [](auto& m, const Tensor& x) { return m(x.transpose(0, 1)).transpose(0, 1); });
      break;
    default:
      net.add("TransformerDecoderLayer" + sizes,
              nn::TransformerDecoderLayer(
                  nn::TransformerDecoderLayerOptions(s.features, heads).dim_feedforward(1 + pick(r, 5)).dropout(0)),
              [](auto& m, const Tensor& x) {
                const Tensor t = x.transpose(0, 1);
                return m(t, t.tanh()).transpose(0, 1);
              });
  }
}

void linear(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t made = 1 + pick(r, 8);
  const auto options = nn::LinearOptions(s.features, made).bias(chance(r, 2));
  if (chance(r, 3)) {
    net.add(fmt::format("checkpoint(Linear({}, {}))", s.features, made), nn::Linear(options),
            [](nn::Linear& m, const Tensor& x) {
              if (!x.requires_grad()) return m(x).tanh();
              return checkpoint([m](const Tensor& h) mutable { return m(h).tanh(); }, x);
            });
  } else {
    net.add(fmt::format("Linear({}, {})", s.features, made), nn::Linear(options));
  }
  s.features = made;
}

void along_sequence(RandomNetImpl& net, NetShape& s, Random& r) {
  const int64_t made = 1 + pick(r, 6), kernel = 1 + pick(r, 3);
  net.add(fmt::format("Conv1d({}, {}, {})", s.features, made, kernel),
          nn::Conv1d(nn::Conv1dOptions(s.features, made, kernel).padding(kernel - 1)),
          [](auto& m, const Tensor& x) { return m(x.transpose(1, 2)).transpose(1, 2); });
  s.features = made;
  s.height += kernel - 1;
}

void norm_of_sequence(RandomNetImpl& net, NetShape& s, Random& r) {
  if (chance(r, 2) && s.batch * s.height > 1) {
    net.add("BatchNorm1d", nn::BatchNorm1d(s.features),
            [](auto& m, const Tensor& x) { return normed(m, x.transpose(1, 2)).transpose(1, 2); });
  } else {
    net.add("LayerNorm", nn::LayerNorm(nn::LayerNormOptions({s.features})));
  }
}

void of_elements(RandomNetImpl& net, NetShape& s, Random& r) {
  switch (pick(r, 9)) {
    case 0: return net.compute("cumsum", [](const Tensor& x) { return x.cumsum(1) / x.size(1); });
    case 1: return net.compute("glu", [](const Tensor& x) { return at::glu(at::cat({x, x + 1}, -1), -1); });
    case 2: return net.compute("products", [](const Tensor& x) { return x + x.matmul(x.mT()).softmax(-1).matmul(x); });
    case 3: return net.compute("sort", [](const Tensor& x) { return std::get<0>(x.sort(1)); });
    case 4:
      return net.compute("gather",
                         [](const Tensor& x) { return x + x.gather(1, x.argmax(1, true).expand(x.sizes())); });
    case 5: return net.compute("roll", [](const Tensor& x) { return x + x.roll(1, 1); });
    case 6: return net.compute("logsumexp", [](const Tensor& x) { return x - x.logsumexp(at::IntArrayRef{1}, true); });
    case 7:
      return net.compute("writes", [](const Tensor& x) {
        Tensor y = x * 1.0;
        y.slice(1, 0, 1).mul_(2);
        y.select(2, 0).copy_(x.select(2, x.size(2) - 1));
        return y;
      });
    default: break;
  }
  net.compute("last", [](const Tensor& x) { return x.slice(1, x.size(1) - 1); });
  s.height = 1;
}

void to_image(RandomNetImpl& net, NetShape& s, Random& /*r*/) {
  net.compute("image", [](const Tensor& x) { return x.transpose(1, 2).unsqueeze(2); });
  s = {true, s.batch, s.features, 1, s.height};
}

constexpr Step kOfSequences[] = {recurrent,      attention,        attention,   linear,      linear,
                                 along_sequence, norm_of_sequence, of_elements, of_elements, to_image};

}  // namespace

RandomNetImpl::RandomNetImpl(unsigned seed) {
  Random random(seed);
  input = chance(random, 2)
              ? NetShape{true, 1 + pick(random, 5), 1 + pick(random, 6), 3 + pick(random, 6), 3 + pick(random, 5)}
              : NetShape{false, 1 + pick(random, 5), 2 * (1 + pick(random, 6)), 1 + pick(random, 6), 1};
  NetShape now = input;
  const int64_t count = 2 + pick(random, 6);
  for (int64_t i = 0; i < count; ++i) {
    const auto& all = now.image ? std::span<const Step>(kOfImages) : std::span<const Step>(kOfSequences);
    all[static_cast<std::size_t>(pick(random, std::ssize(all)))](*this, now, random);
  }
  if (chance(random, 2)) {
    compute("flatten", [](const Tensor& x) { return x.flatten(1); });
    const int64_t features = now.features * now.height * now.width;
    add(fmt::format("Linear({})", features), nn::Linear(features, 1 + pick(random, 7)));
  }
  to(at::kDouble);
  const torch::NoGradGuard no_grad;
  int64_t next = seed % 50;
  for (const Tensor& p : parameters()) p.copy_(sample(p.sizes(), next++) * 0.4 + (p.dim() == 1 ? 0.3 : 0));
}

at::Tensor RandomNetImpl::forward(at::Tensor x) {
  for (const auto& step : steps) x = step(x);
  return x;
}

}  // namespace tessera::testing

#include <ATen/ATen.h>

#include "tessera/tests/operators/more_samples.h"
#include "tessera/tests/ops/rules/made_tensors.h"
#include "tessera/tests/ops/rules/samples.h"

namespace tessera::testing {
namespace {

using namespace made;

using Ints = std::vector<int64_t>;

at::Tensor positive(const Ints& sizes) { return at::rand(sizes, at::kDouble) + 0.5; }
at::Tensor longs(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }
c10::List<at::Tensor> list(const std::vector<at::Tensor>& tensors) { return c10::List<at::Tensor>(tensors); }

// ---- recurrent layers

struct Cell {
  std::string name;
  int64_t gates;
  bool has_cell;  // it has a second state
};

c10::List<at::Tensor> weights(const Cell& cell, int64_t input, int64_t hidden) {
  const int64_t rows = cell.gates * hidden;
  return list({x({rows, input}), x({rows, hidden}), x({rows}), x({rows})});
}

at::IValue states(const Cell& cell, const Ints& sizes) {
  if (!cell.has_cell) return x(sizes);
  return list({x(sizes), x(sizes)});
}

std::vector<Sample> recurrent() {
  std::vector<Sample> out;
  for (const Cell& cell : {Cell{"rnn_tanh", 1, false}, {"rnn_relu", 1, false}, {"gru", 3, false}, {"lstm", 4, true}}) {
    const std::string name = "aten::" + cell.name;
    const c10::List<at::Tensor> params = weights(cell, 3, 2);
    out.push_back(
        {name + ".input", {x({4, 5, 3}), states(cell, {1, 5, 2}), params, true, 1, 0.0, false, false, false}});
    out.push_back({name + ".input", {x({5, 4, 3}), states(cell, {1, 5, 2}), params, true, 1, 0.0, true, false, true}});
    // These are three sequences, of 3, 2 and 1 steps.
    out.push_back(
        {name + ".data", {x({6, 3}), longs({3, 2, 1}), states(cell, {1, 3, 2}), params, true, 1, 0.0, false, false}});
    out.push_back({name + "_cell",
                   {x({5, 3}), states(cell, {5, 2}), params.get(0), params.get(1), params.get(2), params.get(3)}});
  }
  const c10::List<at::Tensor> two_layers =
      list({x({6, 3}), x({6, 2}), x({6}), x({6}), x({6, 2}), x({6, 2}), x({6}), x({6})});
  out.push_back({"aten::gru.input", {x({4, 5, 3}), x({2, 5, 2}), two_layers, true, 2, 0.5, true, false, false}, true});
  out.push_back({"aten::_pack_padded_sequence", {x({3, 5, 2}), longs({3, 3, 2, 1, 1}), false}});
  out.push_back({"aten::_pack_padded_sequence", {x({5, 3, 2}), longs({3, 3, 2, 1, 1}), true}});
  out.push_back({"aten::_pack_padded_sequence_backward", {x({10, 2}), Ints{3, 5, 2}, longs({5, 3, 2}), false}});
  out.push_back({"aten::_pad_packed_sequence", {x({10, 2}), longs({5, 3, 2}), false, 0.5, 4}});
  out.push_back(
      {"aten::_thnn_differentiable_gru_cell_backward", {x({5, 2}), x({5, 6}), x({5, 6}), x({5, 2}), x({6}), x({6})}});
  out.push_back({"aten::_thnn_differentiable_lstm_cell_backward",
                 {x({5, 2}), x({5, 2}), x({5, 8}), x({5, 8}), x({8}), x({8}), x({5, 2}), x({5, 2})}});
  return out;
}

// ---- norms

std::vector<Sample> norms() {
  const at::Tensor image = x({5, 6, 2, 2});
  const at::Tensor grad = x({5, 6, 2, 2});
  const at::Tensor weight = x({6});
  const at::Tensor bias = x({6});
  const at::Tensor mean = x({6});
  const at::Tensor var = positive({6});
  const at::Tensor reserve = at::empty({0}, at::kByte);
  const c10::List<bool> all({true, true, true});
  const auto [y, saved_mean, saved_rstd] = at::native_batch_norm(image, weight, bias, {}, {}, true, 0.1, 1e-5);
  return {
      {"aten::batch_norm", {image, weight, bias, mean, var, false, 0.1, 1e-5, false}},
      {"aten::batch_norm", {image, weight, bias, none(), none(), true, 0.1, 1e-5, false}},
      {"aten::batch_norm", {x({5, 6}), none(), none(), none(), none(), true, 0.1, 1e-5, false}},
      {"aten::instance_norm", {x({3, 4, 5}), x({4}), x({4}), none(), none(), true, 0.1, 1e-5, false}},
      {"aten::instance_norm", {x({3, 4, 5}), x({4}), x({4}), x({4}), positive({4}), false, 0.1, 1e-5, false}},
      {"aten::_batch_norm_impl_index", {image, weight, bias, mean, var, false, 0.1, 1e-5, false}},
      {"aten::_batch_norm_impl_index_backward",
       {0, image, grad, weight, mean, var, saved_mean, saved_rstd, true, 1e-5, all, reserve}},
      {"aten::_batch_norm_no_update", {image, weight, bias, mean, var, 0.1, 1e-5}},
      {"aten::_batch_norm_with_update", {image, weight, bias, mean, var, 0.1, 1e-5}},
      {"aten::_batch_norm_with_update.out",
       {image, weight, bias, mean, var, 0.1, 1e-5, at::empty_like(image), at::empty_like(mean), at::empty_like(mean),
        reserve}},
      {"aten::_batch_norm_with_update_functional", {image, weight, bias, mean, var, 0.1, 1e-5}},
      {"aten::_native_batch_norm_legit.out",
       {image, weight, bias, mean, var, true, 0.1, 1e-5, at::empty_like(image), at::empty_like(mean),
        at::empty_like(mean)}},
      {"aten::_native_batch_norm_legit.no_stats", {image, weight, bias, true, 0.1, 1e-5}},
      {"aten::_native_batch_norm_legit_functional", {image, weight, bias, mean, var, false, 0.1, 1e-5}},
      {"aten::_native_batch_norm_legit_functional", {image, weight, bias, mean, var, true, 0.1, 1e-5}},
      {"aten::native_batch_norm_backward",
       {grad, image, weight, none(), none(), saved_mean, saved_rstd, true, 1e-5, all}},
      {"aten::native_batch_norm_backward", {grad, image, weight, mean, var, none(), none(), false, 1e-5, all}},
      {"aten::batch_norm_backward", {grad, image, weight, mean, var, saved_mean, saved_rstd, true, 1e-5, all, reserve}},
      {"aten::_weight_norm", {x({5, 3, 2}), x({5, 1, 1})}},
      {"aten::_weight_norm", {x({5, 3, 2}), x({1, 3, 1}), 1}},
      {"aten::_weight_norm_interface_backward", {x({5, 3, 2}), x({5, 3, 2}), x({5, 1, 1}), positive({5, 1, 1}), 0}},
      {"aten::_weight_norm_differentiable_backward",
       {x({5, 3, 2}), x({5, 3, 2}), x({5, 1, 1}), positive({5, 1, 1}), 0}},
  };
}

// ---- losses

std::vector<Sample> losses() {
  const at::Tensor log_probs = at::log_softmax(x({6, 5, 4}), 2);
  const at::Tensor targets = ints({5, 3}, 3) + 1;
  const Ints steps = {6, 5, 6, 4, 6};
  const Ints labels = {2, 1, 3, 0, 2};
  // For sequences shorter than the longest, parts of what is saved for backward are never written.
  const Ints all_steps(5, 6);
  const Ints all_labels(5, 3);
  const auto [loss, alpha] = at::_ctc_loss(log_probs, targets, all_steps, all_labels, 0);
  std::vector<Sample> out = {
      {"aten::_ctc_loss", {log_probs, targets, all_steps, all_labels}},
      {"aten::_ctc_loss.Tensor", {log_probs, targets, longs(all_steps), longs(all_labels)}},
      {"aten::_ctc_loss_backward", {x({5}), log_probs, targets, all_steps, all_labels, loss, alpha, 0}},
      {"aten::_ctc_loss_backward.Tensor",
       {x({5}), log_probs, targets, longs(all_steps), longs(all_labels), loss, alpha, 0}},
      {"aten::ctc_loss.IntList", {log_probs, targets, steps, labels}},
      {"aten::ctc_loss.IntList", {log_probs, targets, steps, labels, 0, 0, true}},
      {"aten::ctc_loss.Tensor", {log_probs, targets, longs(steps), longs(labels)}},
      {"aten::ctc_loss.Tensor", {log_probs, targets, longs(steps), longs(labels), 0, 2}},
      {"aten::cosine_embedding_loss", {x({5, 3}), x({5, 3}), ints({5}, 2) * 2 - 1, 0.1}},
      {"aten::multilabel_margin_loss", {x({2, 3}), longs({0, 2, -1, 1, -1, 0}).view({2, 3})}},
  };
  for (const int64_t reduction : {0, 1, 2}) {
    out.push_back({"aten::nll_loss", {x({5, 4}), ints({5}, 4), positive({4}), reduction}});
    out.push_back({"aten::nll_loss2d", {x({5, 4, 2, 3}), ints({5, 2, 3}, 4), none(), reduction}});
    out.push_back({"aten::nll_loss_nd", {x({5, 4, 2}), ints({5, 2}, 4), none(), reduction}});
    const at::Tensor grad = reduction == 0 ? x({5, 3}) : x({});
    out.push_back(
        {"aten::soft_margin_loss_backward", {grad, x({5, 3}), (ints({5, 3}, 2) * 2 - 1).to(at::kDouble), reduction}});
  }
  return out;
}

// ---- embeddings and attention

std::vector<Sample> bags() {
  const at::Tensor table = x({7, 3});
  const at::Tensor indices = ints({9}, 7);
  const at::Tensor offsets = longs({0, 2, 2, 6});
  std::vector<Sample> out;
  for (const int64_t mode : {0, 1, 2}) {
    const auto [y, bag_of, sizes, most] = at::_embedding_bag(table, indices, offsets, false, mode);
    out.push_back({"aten::embedding_bag", {table, indices, offsets, false, mode}});
    out.push_back({"aten::embedding_bag.padding_idx", {table, indices, offsets, false, mode, false, none(), false, 2}});
    out.push_back({"aten::_embedding_bag", {table, indices, offsets, false, mode}});
    out.push_back({"aten::_embedding_bag_forward_only", {table, indices, offsets, false, mode}});
    out.push_back({"aten::_embedding_bag_backward",
                   {x({4, 3}), indices, offsets, bag_of, sizes, most, 7, false, mode, false, none()}});
    out.push_back(
        {"aten::_embedding_bag_dense_backward", {x({4, 3}), indices, bag_of, sizes, most, 7, false, mode, none()}});
  }
  const auto [y, bag_of, sizes, most] = at::_embedding_bag(table, indices, offsets, false, 0, false, x({9}));
  out.push_back({"aten::embedding_bag", {table, indices, offsets, false, 0, false, x({9})}});
  out.push_back({"aten::_embedding_bag_per_sample_weights_backward", {x({4, 3}), table, indices, offsets, bag_of, 0}});
  out.push_back({"aten::embedding_backward", {x({2, 4, 3}), ints({2, 4}, 5), 5, -1, false, false}});
  out.push_back({"aten::embedding_renorm_", {table, indices, 1.0, 2.0}});
  out.push_back({"aten::embedding_renorm", {table, indices, 1.0, 2.0}});
  return out;
}

std::vector<Sample> attention() {
  const int64_t width = 4;
  const at::Tensor q = x({2, 3, width});
  const auto square = [&](int64_t rows) { return x({rows, width}); };
  const at::Tensor heads = x({2, 3, 5, 4});
  return {
      {"aten::scaled_dot_product_attention", {heads, x({2, 3, 6, 4}), x({2, 3, 6, 4}), none(), 0.0, false}},
      {"aten::scaled_dot_product_attention", {heads, x({2, 3, 5, 4}), x({2, 3, 5, 4}), none(), 0.0, true}},
      {"aten::scaled_dot_product_attention", {heads, x({2, 3, 6, 4}), x({2, 3, 6, 4}), none(), 0.5, false}, true},
      {"aten::_native_multi_head_attention",
       {q, q, q, width, 2, square(3 * width), x({3 * width}), square(width), x({width})}},
      {"aten::_transformer_encoder_layer_fwd",
       {q, width, 2, square(3 * width), x({3 * width}), square(width), x({width}), true, false, 1e-5, x({width}),
        x({width}), x({width}), x({width}), square(6), x({6}), x({width, 6}), x({width})}},
      {"aten::_masked_softmax_backward", {x({5, 3}), at::softmax(x({5, 3}), 1), at::rand({5, 3}) < 0.5, 1}},
  };
}

// ---- transforms of signals and images

std::vector<Sample> signals() {
  const at::Tensor complex =
      at::stft(x({5, 12}), 4, std::nullopt, std::nullopt, at::ones({4}, at::kDouble), false, true, true);
  const at::Tensor window = at::hann_window(4, at::kDouble) + 0.1;
  return {
      {"aten::stft", {x({5, 12}), 4, 2, none(), window, false, true, true}},
      {"aten::stft", {x({12}), 4, none(), none(), none(), false, true, true}},
      {"aten::stft.center", {x({5, 12}), 4, 2, none(), window, true, "reflect", false, true, true}},
      {"aten::istft", {complex, 4, none(), none(), window, true, false, true}},
  };
}

std::vector<Sample> resampling() {
  std::vector<Sample> out;
  for (const ResamplingKind& kind : resampling_kinds()) {
    Ints sizes = {5, 3};
    sizes.resize(2 + kind.dims, 2);
    for (const bool by_factor : {false, true}) {
      Sample sample{"aten::" + kind.name + ".vec", {x(sizes)}};
      sample.args.push_back(by_factor ? none() : at::IValue(Ints(kind.dims, 3)));
      if (kind.corners) sample.args.emplace_back(false);
      sample.args.push_back(by_factor ? at::IValue(std::vector<double>(kind.dims, 2.0)) : none());
      out.push_back(std::move(sample));
    }
  }
  const at::Tensor grid = at::rand({3, 5, 2, 2}, at::kDouble) * 2 - 1;
  const at::Tensor image = x({3, 4, 4, 6});
  out.push_back({"aten::grid_sampler", {image, grid, 0, 0, false}});
  const at::Tensor image32 = image.to(at::kFloat);
  const at::Tensor grid32 = grid.to(at::kFloat);
  out.push_back({"aten::_grid_sampler_2d_cpu_fallback", {image32, grid32, 0, 0, false}});
  out.push_back(
      {"aten::_grid_sampler_2d_cpu_fallback_backward", {x({3, 4, 5, 2}).to(at::kFloat), image32, grid32, 0, 0, false}});
  out.push_back({"aten::affine_grid_generator", {x({3, 2, 3}), Ints{3, 2, 4, 5}, false}});
  out.push_back({"aten::affine_grid_generator", {x({3, 3, 4}), Ints{3, 2, 2, 4, 5}, false}});
  out.push_back({"aten::affine_grid_generator_backward", {x({3, 4, 5, 2}), Ints{3, 2, 4, 5}, false}});
  return out;
}

// ---- convolutions by other names

std::vector<Sample> convolutions() {
  const Ints one = {1, 1};
  const Ints zero = {0, 0};
  const Ints two = {2, 2};
  const Ints one3 = {1, 1, 1};
  const Ints zero3 = {0, 0, 0};
  const Ints two3 = {2, 2, 2};
  const at::Tensor image = x({5, 3, 4, 4});
  const at::Tensor kernel = x({2, 3, 2, 2});
  const at::Tensor volume = x({2, 3, 4, 4, 3});
  const at::Tensor kernel3 = x({2, 3, 2, 2, 2});
  const at::Tensor grad = x({5, 2, 3, 3});
  const c10::List<bool> all({true, true, true});
  return {
      {"aten::_convolution_mode", {image, kernel, x({2}), one, "same", one, 1}},
      {"aten::_convolution_mode", {image, kernel, none(), two, "valid", one, 1}},
      {"aten::_convolution_double_backward",
       {image, kernel, x({2}), grad, kernel, image, one, zero, one, false, zero, 1, all}},
      {"aten::conv_transpose1d", {x({5, 3, 4}), x({3, 2, 2}), x({2}), Ints{2}}},
      {"aten::conv_transpose2d.input", {image, x({3, 2, 2, 2}), x({2}), two}},
      {"aten::conv_tbc", {x({4, 5, 3}), x({2, 3, 2}), x({2}), 1}},
      {"aten::conv_tbc_backward", {x({5, 5, 2}), x({4, 5, 3}), x({2, 3, 2}), x({2}), 1}},
      {"aten::thnn_conv2d", {image, kernel, two, x({2})}},
      {"aten::_slow_conv2d_forward", {image, kernel, two, x({2}), one, zero}},
      {"aten::_slow_conv2d_backward.output_mask", {grad, image, kernel, two, one, zero, all}},
      {"aten::_slow_conv2d_backward.grad_input",
       {grad, image, kernel, two, one, zero, at::empty_like(image), at::empty_like(kernel),
        at::empty({2}, at::kDouble)}},
      {"aten::slow_conv_dilated2d", {image, kernel, two, x({2}), one, zero, two}},
      {"aten::slow_conv_dilated3d", {volume, kernel3, two3, x({2}), one3, zero3, one3}},
      {"aten::slow_conv3d", {volume, kernel3, two3, x({2})}},
      {"aten::slow_conv3d_forward", {volume, kernel3, two3, x({2}), one3, zero3}},
      {"aten::_convolution.deprecated", {image, kernel, x({2}), one, zero, one, false, zero, 1, false, false, false}},
      {"aten::slow_conv_transpose2d", {image, x({3, 2, 2, 2}), two, x({2}), two}},
      {"aten::slow_conv_transpose3d", {volume, x({3, 2, 2, 2, 2}), two3, x({2}), two3}},
      {"aten::_nnpack_spatial_convolution",
       {image.to(at::kFloat), kernel.to(at::kFloat), x({2}).to(at::kFloat), zero, one}},
      {"aten::adaptive_avg_pool3d_backward.grad_input", {x({2, 3, 2, 2, 3}), volume, at::empty_like(volume)}},
  };
}

}  // namespace

std::vector<Sample> model_samples() {
  std::vector<Sample> out;
  for (auto& more : {recurrent(), norms(), losses(), bags(), attention(), signals(), resampling(), convolutions()})
    out.insert(out.end(), more.begin(), more.end());
  return out;
}

}  // namespace tessera::testing

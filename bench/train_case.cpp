#include "tessera/bench/train_case.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "tessera/bench/block.h"

namespace tessera::bench {

std::string TrainCase::mesh_name() const {
  std::string out = dp > 1 ? fmt::format("dp={}", dp) : "";
  if (tp > 1) out += fmt::format("{}tp={}", out.empty() ? "" : ",", tp);
  return zero > 0 ? out + " zero" : out;
}

std::string TrainCase::name() const { return fmt::format("{}, hidden {}", mesh_name(), hidden); }

std::string TrainCase::text() const {
  return fmt::format("{} {} {} {} {} {} {} {}", dp, tp, zero, hidden, layers, heads, sequence, batch);
}

TrainCase TrainCase::parse(const std::string& text) {
  TrainCase out;
  std::istringstream in(text);
  if (!(in >> out.dp >> out.tp >> out.zero >> out.hidden >> out.layers >> out.heads >> out.sequence >> out.batch)) {
    throw std::invalid_argument(fmt::format("\"{}\" is not DP TP ZERO HIDDEN LAYERS HEADS SEQUENCE BATCH", text));
  }
  return out;
}

std::vector<TrainParameter> root_parameters(const TrainCase& size) {
  const int64_t h = size.hidden, v = TrainCase::kVocabulary;
  return {{{v, h}, 0, false}, {{size.sequence, h}, -1, false}, {{h}, -1, false}, {{h}, -1, true}, {{v, h}, 0, false}};
}

std::vector<TrainParameter> block_parameters(const TrainCase& size) {
  const int64_t h = size.hidden;
  std::vector<TrainParameter> out;
  const auto norm = [&] {
    out.push_back({{h}, -1, false});
    out.push_back({{h}, -1, true});
  };
  const auto linear = [&](int64_t in, int64_t features, int64_t cut_dim) {
    out.push_back({{features, in}, cut_dim, false});
    out.push_back({{features}, cut_dim == 0 ? 0 : -1, true});
  };
  norm();
  for (int i = 0; i < 3; ++i) linear(h, h, 0);
  linear(h, h, 1);
  norm();
  linear(h, 4 * h, 0);
  linear(4 * h, h, 1);
  return out;
}

std::vector<TrainParameter> all_parameters(const TrainCase& size) {
  const std::vector<TrainParameter> root = root_parameters(size), block = block_parameters(size);
  std::vector<TrainParameter> out(root.begin(), root.begin() + 2);
  for (int64_t i = 0; i < size.layers; ++i) out.insert(out.end(), block.begin(), block.end());
  out.insert(out.end(), root.begin() + 2, root.end());
  return out;
}

at::Tensor first_values(const TrainCase& size, const TrainParameter& parameter, int64_t index) {
  if (parameter.sizes.size() == 2) {
    return numbers(parameter.sizes, index, 0.64 / std::sqrt(static_cast<double>(size.hidden)));
  }
  return parameter.is_bias ? at::zeros(parameter.sizes) : at::ones(parameter.sizes);
}

std::pair<at::Tensor, at::Tensor> rows_of(const TrainCase& size, int64_t rank) {
  const at::Tensor all = at::arange(size.batch * (size.sequence + 1), at::kLong)
                             .mul(2654435761)
                             .remainder(1009)
                             .remainder(TrainCase::kVocabulary)
                             .view({size.batch, size.sequence + 1});
  const int64_t rows = size.batch / size.dp;
  const at::Tensor mine = all.narrow(0, rank * rows, rows);
  return {mine.narrow(1, 0, size.sequence).contiguous(), mine.narrow(1, 1, size.sequence).contiguous()};
}

}  // namespace tessera::bench

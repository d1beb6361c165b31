#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::testing {

using Tensors = std::vector<at::Tensor>;

// The operands of calls. x, y, mask, image and heads have the column's layout; the others are replicated.
struct Operands {
  at::Tensor x, y;     // (6, 5)
  at::Tensor mask;     // (6, 5), bool
  at::Tensor image;    // (4, 4, 6, 6): batch, channels, places
  at::Tensor heads;    // (4, 2, 6, 8): batch, heads, length, width
  at::Tensor weight;   // (5, 4)
  at::Tensor vector;   // (5)
  at::Tensor rows;     // (6), long: rows of x
  at::Tensor columns;  // (6, 5), long: columns of x
  at::Tensor classes;  // (6), long: below 5
  at::Tensor filter;   // (3, 4, 3, 3)
};

// A common call, and the collectives that it and its backward make for each layout of x: S(0), S(1), P(sum), Ragged(0)
// on four ranks, and [S(0), S(1)] on {2, 2}. Each collective is one letter, in the order in which they run: g
// all_gather, r all_reduce, s reduce_scatter, a all_to_all, b broadcast, p permute; "-" for none. Those of backward, if
// it exists, follow a '/'.
struct Row {
  std::string call;
  std::function<Tensors(const Operands&)> run;
  std::string expected;  // "- - r/g ga -"
};

inline Tensors as_tensors(const at::Tensor& t) { return {t}; }
inline Tensors as_tensors(const Tensors& t) { return t; }
template <class... T>
Tensors as_tensors(const std::tuple<T...>& t) {
  return std::apply([](const auto&... each) { return Tensors{each...}; }, t);
}
// Makes a result that is a number into tensors.
inline Tensors as_tensors(double value) { return {at::scalar_tensor(value, at::kDouble)}; }
inline Tensors as_tensors(bool value) { return {at::scalar_tensor(value, at::kBool)}; }

std::vector<Row> pointwise_rows();
std::vector<Row> reduction_rows();
std::vector<Row> shape_rows();
std::vector<Row> indexing_rows();
std::vector<Row> product_rows();
std::vector<Row> layer_rows();
std::vector<Row> in_place_rows();

}  // namespace tessera::testing

// Makes a row of a call as users write it, with its operands by their names.
#define EVERYDAY(expected, ...)                                                                                   \
  ::tessera::testing::Row {                                                                                       \
#__VA_ARGS__, [](const ::tessera::testing::Operands& operands) {                                                \
      [[maybe_unused]] const auto& [x, y, mask, image, heads, weight, vector, rows, columns, classes, filter] =     \
          operands;                                                                                                 \
      return ::tessera::testing::as_tensors(__VA_ARGS__);                                                           \
    },                                                                                                              \
        expected \
  }

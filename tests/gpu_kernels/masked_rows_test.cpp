#include "tessera/gpu_kernels/masked_rows.h"

#include <optional>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/ops/kernels/masked_rows.h"

using namespace tessera;
using tessera::detail::HeldRows;

namespace {

HeldRows rows_from(int64_t begin, int64_t end, int64_t all) { return {one_interval(begin, end), all}; }

// Returns what the threads of the kernel look up, and sets `valid` to whether each id names a row of the table.
at::Tensor by_threads(const at::Tensor& weight, const at::Tensor& ids, const HeldRows& rows, const at::Tensor& out,
                      bool& valid) {
  const std::optional<gpu::MaskedRows> request = tessera::detail::masked_rows_request(weight, ids, rows, out);
  REQUIRE(request);
  valid = true;
  for (int64_t at = 0; at < request->count * request->words; ++at) {
    gpu::with_word(request->word, [&]<class Word>(Word) {
      valid &= request->index == gpu::Number::kInt ? gpu::copy_masked<int32_t, Word>(*request, at)
                                                   : gpu::copy_masked<int64_t, Word>(*request, at);
    });
  }
  return out;
}

at::Tensor table(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return at::arange(1, rows * columns + 1, at::kDouble).remainder(97).add(1).to(dtype).view({rows, columns});
}

}  // namespace

TEST_CASE("the threads of a masked embedding copy the rows that a rank holds, and write zeros elsewhere") {
  const at::Tensor ids = at::tensor({0, 11, 3, 4, 7, 8, 3, 5}, at::kLong).view({2, 4});
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kComplexDouble}) {
    CAPTURE(c10::toString(dtype));
    for (const int64_t columns : {1, 3, 8, 64}) {
      CAPTURE(columns);
      const at::Tensor whole = table(12, columns, dtype);
      for (const HeldRows& rows :
           {rows_from(0, 12, 12), rows_from(4, 8, 12), rows_from(11, 12, 12), rows_from(0, 0, 12)}) {
        const Interval held = rows.held.empty() ? Interval{} : rows.held[0];
        const at::Tensor here = ids.ge(held.begin).logical_and(ids.lt(held.end)).unsqueeze(-1);
        const at::Tensor want = at::where(here, at::embedding(whole, ids), at::zeros({}, dtype));
        const at::Tensor piece = whole.slice(0, held.begin, held.end);
        // A table whose rows lie farther apart than they are long, and a result at an odd place.
        const at::Tensor wide = at::zeros({held.size(), columns + 1}, dtype);
        wide.slice(1, 0, columns).copy_(piece);
        for (const at::Tensor& weight : {piece.clone(), wide.slice(1, 0, columns)}) {
          for (const int64_t before : {0, 1}) {
            const at::Tensor memory = at::ones({8 * columns + before}, dtype);
            const at::Tensor out = memory.slice(0, before).view({2, 4, columns});
            bool valid = false;
            CHECK(by_threads(weight, ids, rows, out, valid).equal(want));
            CHECK(valid);
            out.fill_(1);
            CHECK(by_threads(weight, ids.to(at::kInt), rows, out, valid).equal(want));
          }
        }
        CHECK(tessera::detail::masked_rows(piece, ids, rows).equal(want));
      }
    }
  }
}

TEST_CASE("rows are copied by the widest words that memory allows") {
  const HeldRows rows = rows_from(0, 4, 4);
  const at::Tensor ids = at::zeros({2}, at::kLong);
  const auto word = [&](const at::Tensor& weight) {
    const at::Tensor out = at::empty({2, weight.size(1)}, weight.options());
    return tessera::detail::masked_rows_request(weight, ids, rows, out)->word;
  };
  CHECK(word(at::zeros({4, 8}, at::kHalf)) == 16);
  CHECK(word(at::zeros({4, 12}, at::kHalf)) == 8);
  CHECK(word(at::zeros({4, 16}, at::kHalf).slice(1, 0, 8)) == 16);
  CHECK(word(at::zeros({4, 10}, at::kHalf).slice(1, 0, 8)) == 4);
  CHECK(word(at::zeros({4, 7}, at::kHalf)) == 2);
  CHECK(word(at::zeros({4, 7}, at::kByte)) == 1);
}

TEST_CASE("the threads notice an id outside the table, and the CPU refuses it") {
  const HeldRows rows = rows_from(4, 8, 12);
  const at::Tensor weight = table(4, 3, at::kFloat);
  for (const int64_t id : {int64_t{-1}, int64_t{12}, int64_t{1} << 40}) {
    bool valid = true;
    const at::Tensor ids = at::tensor({int64_t{5}, id});
    const at::Tensor out = by_threads(weight, ids, rows, at::ones({2, 3}), valid);
    CHECK_FALSE(valid);
    CHECK(out[1].eq(0).all().item<bool>());
    CHECK_THROWS_AS(tessera::detail::masked_rows(weight, ids, rows), std::out_of_range);
  }
}

TEST_CASE("several intervals of rows, and columns that are not adjacent, are not for the kernel") {
  const at::Tensor ids = at::tensor({0, 1, 2, 3, 4, 5}, at::kLong);
  const HeldRows several{{{0, 2}, {4, 5}}, 6};
  const at::Tensor whole = table(6, 4, at::kDouble);
  const at::Tensor piece = whole.index_select(0, at::tensor({0, 1, 4}));
  const at::Tensor out = at::zeros({6, 4}, at::kDouble);
  CHECK_FALSE(tessera::detail::masked_rows_request(piece, ids, several, out));
  CHECK_FALSE(tessera::detail::masked_rows_request(table(4, 6, at::kDouble).t(), ids, rows_from(0, 6, 6), out));
  at::Tensor want = whole.clone();
  for (const int64_t row : {2, 3, 5}) want[row].zero_();
  CHECK(tessera::detail::masked_rows(piece, ids, several).equal(want));
}

TEST_CASE("the ranks' masked embeddings, their gradients and the gradients of these add up to the embedding's") {
  const at::Tensor ids = at::tensor({0, 11, 3, 4, 7, 8, 3, 5}, at::kLong).view({2, 4});
  const at::Tensor g = at::arange(8 * 3, at::kDouble).sin().view({2, 4, 3});
  for (const int64_t padding : {-1, 3, 8}) {
    for (const bool by_freq : {false, true}) {
      CAPTURE(padding);
      CAPTURE(by_freq);
      const at::Tensor whole = table(12, 3, at::kDouble).requires_grad_();
      const at::Tensor whole_g = g.clone().requires_grad_();
      const at::Tensor want = at::embedding(whole, ids, padding, by_freq);
      const at::Tensor want_gradient = torch::autograd::grad({want}, {whole}, {whole_g}, true, true)[0];
      at::Tensor sum = at::zeros_like(want);
      for (const auto& [begin, end] : {std::pair(0, 5), std::pair(5, 10), std::pair(10, 12), std::pair(12, 12)}) {
        const at::Tensor piece = whole.detach().slice(0, begin, end).clone().requires_grad_();
        const at::Tensor piece_g = g.clone().requires_grad_();
        const at::Tensor got =
            tessera::detail::masked_embedding(piece, ids, rows_from(begin, end, 12), padding, by_freq);
        const at::Tensor gradient = torch::autograd::grad({got}, {piece}, {piece_g}, true, true)[0];
        CHECK(gradient.equal(want_gradient.slice(0, begin, end)));
        sum += got.detach();
        const at::Tensor v = at::arange((end - begin) * 3, at::kDouble).view({end - begin, 3});
        const at::Tensor second = torch::autograd::grad({gradient}, {piece_g}, {v})[0];
        at::Tensor whole_v = at::zeros({12, 3}, at::kDouble);
        whole_v.slice(0, begin, end).copy_(v);
        CHECK(second.equal(torch::autograd::grad({want_gradient}, {whole_g}, {whole_v}, true)[0]));
      }
      CHECK(sum.equal(want));
    }
  }
}

#include "tessera/gpu_kernels/fill.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/random/stretches.h"
#include "tessera/tests/gpu_kernels/pieces.h"

using namespace tessera;
using namespace tessera::testing;
namespace draws = tessera::detail;

namespace {

// Returns the elements of the global tensor in the piece's order.
std::vector<int64_t> elements_of(const Held& held, int64_t width) {
  std::vector<int64_t> found;
  draws::each_stretch(held.sizes, held.tile, width, [&](int64_t global, int64_t local, int64_t count) {
    CHECK(local == static_cast<int64_t>(found.size()));
    for (int64_t i = 0; i < count; ++i) found.push_back(global + i);
  });
  return found;
}

gpu::PieceTable described(const Held& held, int64_t width) {
  gpu::PieceTable piece;
  REQUIRE(draws::describe_piece(held.sizes, held.tile, width, piece));
  return piece;
}

// Checks that threads that each do their share give `want`, the host's draw.
template <class Make>
void check_threads(const Held& held, const at::Tensor& want, int64_t width, const Make& make) {
  using T = typename Make::Value;
  const gpu::PieceTable piece = described(held, width);
  const at::Tensor numbers = width == 2 ? at::view_as_real(want) : want;
  const auto is_wanted = [&](const at::Tensor& got) { return got.equal(numbers); };
  for (const int64_t workers : {1, 7}) {
    at::Tensor got = at::zeros_like(numbers);
    for (int64_t worker = 0; worker < workers; ++worker) {
      gpu::fill_piece(got.data_ptr<T>(), got.numel(), piece, kKey.seed, kKey.draw, make, worker % 2 == 0, worker,
                      workers);
    }
    CHECK(is_wanted(got));
    const gpu::Dim& dim = piece.dims[0];
    if (piece.ndim > 1 || dim.count > 0 || dim.block < dim.held || dim.begin % Make::kPerBlock != 0) continue;
    got.zero_();
    for (int64_t worker = 0; worker < workers; ++worker) {
      gpu::fill_stretch(got.data_ptr<T>(), got.numel(), static_cast<uint64_t>(dim.begin), kKey.seed, kKey.draw, make,
                        worker, workers);
    }
    CHECK(is_wanted(got));
  }
}

}  // namespace

TEST_CASE("a piece as plain data has the elements of the tile, and says which are adjacent") {
  for (const Held& held : pieces()) {
    for (const int64_t width : {1, 2}) {
      CAPTURE(held.name);
      CAPTURE(width);
      const std::vector<int64_t> want = elements_of(held, width);
      const gpu::PieceTable piece = described(held, width);
      const auto n = static_cast<int64_t>(want.size());
      for (int64_t i = 0; i < n; ++i) {
        const gpu::GlobalPlace place = gpu::place_of(piece, i);
        REQUIRE(static_cast<int64_t>(place.global) == want[i]);
        REQUIRE(place.adjacent >= 1);
        REQUIRE(i + place.adjacent <= n);
        REQUIRE(static_cast<int64_t>(place.global) + place.adjacent - 1 == want[i + place.adjacent - 1]);
      }
    }
  }
}

TEST_CASE("places are right in tensors of more than 2^32 elements") {
  const Held held = {"rows and columns", {5, int64_t{1} << 33}, {one_interval(1, 4), one_interval(3, 1LL << 32)}};
  const gpu::PieceTable piece = described(held, 1);
  const int64_t columns = (1LL << 32) - 3;
  CHECK(gpu::place_of(piece, 0).global == (uint64_t{1} << 33) + 3);
  CHECK(gpu::place_of(piece, columns - 1).global == (uint64_t{1} << 33) + (1LL << 32) - 1);
  CHECK(gpu::place_of(piece, columns).global == (uint64_t{1} << 34) + 3);
  CHECK(gpu::place_of(piece, columns).adjacent == columns);
}

TEST_CASE("a piece that the table has no room for is refused") {
  gpu::PieceTable piece;
  Intervals irregular;
  for (int64_t i = 0; i < 65; ++i) append(irregular, {i * 7, i * 7 + 1 + i % 4});
  CHECK(!draws::describe_piece(std::vector<int64_t>{500}, {irregular}, 1, piece));
  irregular.pop_back();
  CHECK(draws::describe_piece(std::vector<int64_t>{500}, {irregular}, 1, piece));
  const std::vector<int64_t> sizes(17, 3);
  CHECK(!draws::describe_piece(sizes, Tile(17, one_interval(0, 2)), 1, piece));
  CHECK(draws::describe_piece(sizes, Tile(17, one_interval(0, 3)), 1, piece));
  CHECK(piece.ndim == 1);
}

TEST_CASE("the threads of a draw make together what the host makes") {
  for (const Held& held : pieces()) {
    CAPTURE(held.name);
    const Spec spec = spec_of(held);
    const auto drawn = [&](at::ScalarType dtype, auto draw) {
      const at::Tensor out = empty_piece(held, dtype);
      draw(out);
      return out;
    };
    const auto uniform = [&](const at::Tensor& t) { draws::draw_uniform(t, spec, kKey, -1, 2); };
    check_threads(held, drawn(at::kFloat, uniform), 1, gpu::Uniform<float>(-1, 2));
    check_threads(held, drawn(at::kDouble, uniform), 1, gpu::Uniform<double>(-1, 2));
    check_threads(held, drawn(at::kHalf, uniform), 1, gpu::Uniform<at::Half>(-1, 2));
    check_threads(held, drawn(at::kBFloat16, uniform), 1, gpu::Uniform<at::BFloat16>(-1, 2));
    check_threads(held, drawn(at::kComplexFloat, uniform), 2, gpu::Uniform<float>(-1, 2));
    const auto normal = [&](const at::Tensor& t) { draws::draw_normal(t, spec, kKey, 1, 2); };
    check_threads(held, drawn(at::kFloat, normal), 1, gpu::Normal<float>(1, 2));
    check_threads(held, drawn(at::kDouble, normal), 1, gpu::Normal<double>(1, 2));
    const auto exponential = [&](const at::Tensor& t) { draws::draw_exponential(t, spec, kKey, 3); };
    check_threads(held, drawn(at::kFloat, exponential), 1, gpu::Exponential<float>(3));
    const auto integers = [&](const at::Tensor& t) { draws::draw_integers(t, spec, kKey, -9, 20); };
    check_threads(held, drawn(at::kLong, integers), 1, gpu::Integers<int64_t>(-9, 20));
    check_threads(held, drawn(at::kByte, integers), 1, gpu::Integers<uint8_t>(-9, 20));
    const auto bernoulli = [&](const at::Tensor& t) { draws::draw_bernoulli(t, spec, kKey, 0.3); };
    check_threads(held, drawn(at::kBool, bernoulli), 1, gpu::Bernoulli<bool>(0.3));
    check_threads(held, drawn(at::kDouble, bernoulli), 1, gpu::Bernoulli<double>(0.3));
    const at::Tensor p = empty_piece(held, at::kDouble).uniform_();
    const auto each = [&](const at::Tensor& t) { draws::draw_bernoulli(t, spec, kKey, p); };
    check_threads(held, drawn(at::kInt, each), 1, gpu::BernoulliEach<int32_t>(p.const_data_ptr<double>()));
  }
}

TEST_CASE("an exponential number is positive in every dtype") {
  const gpu::PhiloxWords most = {~0U, ~0U, ~0U, ~0U};  // make the number nearest to 1, whose logarithm is nearest to 0
  CHECK(static_cast<double>(gpu::Exponential<at::Half>(3)(most, 0, 0)) == 0x1p-24);
  CHECK(static_cast<double>(gpu::Exponential<at::BFloat16>(1e25)(most, 0, 0)) == 0x1p-133);
  CHECK(static_cast<double>(gpu::Exponential<float>(1e30)(most, 0, 0)) == 0x1p-149);
  CHECK(gpu::Exponential<double>(1e308)(most, 0, 0) > 0);
  CHECK(gpu::Exponential<float>(3)(most, 0, 0) < 1e-15);
  CHECK(gpu::Exponential<float>(std::numeric_limits<double>::infinity())(most, 0, 0) == 0);
}

TEST_CASE("the bound of an event decides as its probability does") {
  for (const double p : {0.0, -1.0, 1.0, 2.0, 0.5, 0.3, 1e-10, 0x1p-32, 0x1.8p-32, 1 - 0x1p-32, 1 - 0x1p-33, 5e-324}) {
    CAPTURE(p);
    const uint64_t bound = gpu::bound_of(p);
    for (const uint64_t near : {uint64_t{0}, uint64_t{1}, uint64_t{2}, bound - 1, bound, bound + 1, ~uint64_t{0}}) {
      const auto word = static_cast<uint32_t>(near);
      CHECK((word < bound) == gpu::chance({word, 0, 0, 0}, 0, p));
    }
  }
}

TEST_CASE("sine and cosine of every angle that a draw can have are near the exact ones") {
  double farthest = 0;
  for (uint32_t turn = 0; turn < 1U << 24; ++turn) {
    const float angle = 2 * std::numbers::pi_v<float> * (static_cast<float>(turn) * 0x1p-24F);
    const gpu::SineAndCosine got = gpu::sine_and_cosine(angle);
    const double sine = std::sin(static_cast<double>(angle)), cosine = std::cos(static_cast<double>(angle));
    if (turn == 0) CHECK(got.sine == 0);
    if (turn > 0) farthest = std::max(farthest, std::abs(got.sine / sine - 1));
    farthest = std::max(farthest, std::abs(got.cosine / cosine - 1));
  }
  CHECK(farthest < 0x1p-21);
}

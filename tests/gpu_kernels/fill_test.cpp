#include "tessera/gpu_kernels/fill.h"

#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/spec.h"
#include "tessera/dtensor/random/draws.h"
#include "tessera/dtensor/random/stretches.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/layout.h"

using namespace tessera;
namespace draws = tessera::detail;
using draws::DrawKey;

namespace {

struct Held {
  const char* name;
  std::vector<int64_t> sizes;
  Tile tile;
};

// Returns the indices that part `part` of `parts` holds of a dimension which is dealt out in blocks.
Intervals dealt(int64_t size, int64_t block, int64_t part, int64_t parts) {
  Intervals held;
  for (int64_t begin = part * block; begin < size; begin += parts * block) {
    append(held, {begin, std::min(begin + block, size)});
  }
  return held;
}

std::vector<Held> pieces() {
  const auto all = [](int64_t n) { return one_interval(0, n); };
  Intervals irregular;
  for (int64_t i = 0; i < 40; ++i) append(irregular, {i * 7 + i % 3, i * 7 + i % 3 + 1 + i % 4});
  return {
      {"a number", {}, {}},
      {"all", {5, 7}, {all(5), all(7)}},
      {"rows", {10, 7}, {one_interval(4, 7), all(7)}},
      {"the last rows, which are fewer", {10, 7}, {one_interval(9, 10), all(7)}},
      {"columns", {5, 7}, {all(5), one_interval(3, 6)}},
      {"one column", {9, 7}, {all(9), one_interval(6, 7)}},
      {"the middle dimension", {3, 8, 4}, {all(3), one_interval(2, 5), all(4)}},
      {"a corner", {6, 9, 5}, {one_interval(2, 4), one_interval(3, 9), one_interval(1, 4)}},
      {"two dimensions of one element", {1, 12, 1}, {all(1), one_interval(5, 12), all(1)}},
      {"blocks of rows", {23, 3}, {dealt(23, 2, 1, 3), all(3)}},
      {"blocks of columns", {4, 23}, {all(4), dealt(23, 3, 0, 2)}},
      {"blocks, the last of which is shorter", {4, 11, 2}, {all(4), dealt(11, 2, 2, 3), all(2)}},
      {"blocks of both", {17, 19}, {dealt(17, 2, 0, 2), dealt(19, 3, 1, 2)}},
      {"irregular intervals", {300}, {irregular}},
      {"irregular intervals of both", {30, 16}, {{{1, 2}, {4, 9}, {20, 21}}, {{0, 3}, {5, 6}, {14, 16}}}},
      {"many blocks", {4000, 2}, {dealt(4000, 1, 1, 2), all(2)}},
  };
}

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

Spec spec_of(const Held& held) {
  static const DeviceMesh mesh = init_device_mesh("cpu", {1}, {}, World::create({}));
  return {.mesh = mesh, .sizes = held.sizes, .tile = held.tile};
}

at::Tensor empty_piece(const Held& held, at::ScalarType dtype) {
  std::vector<int64_t> sizes;
  for (const Intervals& part : held.tile) sizes.push_back(count(part));
  return at::empty(sizes, dtype);
}

constexpr DrawKey kKey = {.seed = (uint64_t{5} << 40) + 17, .draw = 3};

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

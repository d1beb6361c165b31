#include "tessera/gpu_kernels/copies.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/redistribute/copies.h"
#include "tessera/dtensor/redistribute/region.h"

using namespace tessera;

namespace {

// Collects what the kernel is told of copies.
struct Collected {
  std::vector<gpu::Copy> copies;

  void operator()(const StridedCopy& part) {
    const std::optional<gpu::Copy> request = copy_request(part);
    REQUIRE(request);
    copies.push_back(*request);
  }

  // Does what all threads do, with tables that have room for kRoom copies, and returns the number of launches.
  template <int kRoom>
  int run() const {
    int launches = 0;
    const auto count = static_cast<int64_t>(copies.size());
    for (int64_t done = 0; done < count; ++launches) {
      gpu::CopyTable<kRoom> table;
      done += gpu::fill_table(table, copies.data() + done, count - done);
      for (int64_t tile = 0; tile < table.tiles; ++tile) {
        for (int thread = 0; thread < gpu::kTileThreads; ++thread) {
          gpu::copy_tile(table, tile, static_cast<uint32_t>(thread));
        }
      }
    }
    return launches;
  }
};

struct Part {
  const char* name;
  std::vector<int64_t> sizes;  // of the tensor
  Tile positions;
};

Intervals blocks(int64_t size, int64_t block, int64_t period) {
  Intervals out;
  for (int64_t begin = 0; begin < size; begin += period) append(out, {begin, std::min(begin + block, size)});
  return out;
}

std::vector<Part> parts() {
  const auto all = [](int64_t n) { return one_interval(0, n); };
  return {
      {"a number", {}, {}},
      {"all", {40, 56}, {all(40), all(56)}},
      {"rows", {40, 56}, {one_interval(8, 17), all(56)}},
      {"columns at even places", {40, 56}, {all(40), one_interval(16, 32)}},
      {"columns at odd places", {40, 57}, {all(40), one_interval(3, 20)}},
      {"one column", {40, 57}, {all(40), one_interval(5, 6)}},
      {"nothing", {40, 57}, {all(40), {}}},
      {"a box of four dimensions",
       {6, 7, 8, 9},
       {one_interval(1, 5), one_interval(2, 6), one_interval(3, 7), one_interval(4, 8)}},
      {"blocks of rows", {41, 16}, {blocks(41, 3, 6), all(16)}},
      {"blocks of both", {41, 57}, {blocks(41, 3, 6), blocks(57, 2, 4)}},
      {"irregular intervals", {41, 57}, {{{1, 4}, {6, 7}, {20, 33}}, {{0, 8}, {9, 10}, {40, 57}}}},
      {"more than a tile", {90, 100}, {one_interval(1, 90), one_interval(0, 99)}},
  };
}

const std::vector<at::ScalarType> kDtypes = {at::kBool, at::kBFloat16,     at::kFloat,
                                             at::kLong, at::kComplexFloat, at::kComplexDouble};

at::Tensor numbers(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const int64_t n = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return at::arange(n, at::kDouble).remainder(dtype == at::kBool ? 2 : 251).to(dtype).view(sizes);
}

}  // namespace

TEST_CASE("the threads of one launch pack and unpack regions of many tensors as Region does one after the other") {
  // Each region has a buffer of its own, and begins at a multiple of 16 bytes or one element behind it.
  for (const int64_t alignment : {16, 1}) {
    std::vector<at::Tensor> tensors, want, packed, got;
    std::vector<Region> regions;
    Collected packs, unpacks;
    for (const Part& part : parts()) {
      for (const at::ScalarType dtype : kDtypes) {
        regions.emplace_back(part.positions, part.sizes);
        const int64_t n = regions.back().numel(), before = alignment == 16 ? 0 : 1;
        tensors.push_back(numbers(part.sizes, dtype));
        want.push_back(at::zeros({n + before}, dtype));
        packed.push_back(at::zeros({n + before}, dtype));
        got.push_back(at::zeros(part.sizes, dtype));
        regions.back().pack(tensors.back(), want.back(), before);
        regions.back().pack(tensors.back(), packed.back(), before, packs);
        regions.back().unpack(packed.back(), before, got.back(), unpacks);
      }
    }
    CHECK(packs.run<7>() == (static_cast<int>(packs.copies.size()) + 6) / 7);
    CHECK(unpacks.run<1000>() == 1);
    for (std::size_t i = 0; i < regions.size(); ++i) {
      CAPTURE(parts()[i / kDtypes.size()].name);
      CAPTURE(c10::toString(tensors[i].scalar_type()));
      CHECK(packed[i].equal(want[i]));
      const at::Tensor back = at::zeros_like(got[i]);
      regions[i].unpack(want[i], alignment == 16 ? 0 : 1, back);
      CHECK(got[i].equal(back));
    }
  }
}

TEST_CASE("copies are made by the widest words that runs and addresses allow") {
  const auto word = [](const at::Tensor& t, const Tile& positions) {
    const Region region(positions, t.sizes().vec());
    Collected copies;
    region.pack(t, at::empty({region.numel()}, t.options()), 0, copies);
    REQUIRE(copies.copies.size() == 1);
    return std::pair(copies.copies[0].word, gpu::word_count(copies.copies[0]));
  };
  const Intervals rows = one_interval(0, 4);
  CHECK(word(at::zeros({4, 64}, at::kHalf), {rows, one_interval(8, 24)}) == std::pair(16, 8));
  CHECK(word(at::zeros({4, 64}, at::kHalf), {rows, one_interval(4, 12)}) == std::pair(8, 8));
  CHECK(word(at::zeros({4, 64}, at::kHalf), {rows, one_interval(2, 8)}) == std::pair(4, 12));
  CHECK(word(at::zeros({4, 63}, at::kHalf), {rows, one_interval(0, 8)}) == std::pair(2, 32));
  CHECK(word(at::zeros({4, 64}, at::kHalf), {rows, one_interval(3, 4)}) == std::pair(2, 4));
  CHECK(word(at::zeros({4, 64}, at::kBool), {rows, one_interval(3, 10)}) == std::pair(1, 28));
  CHECK(word(at::zeros({4, 64}, at::kComplexDouble), {rows, one_interval(3, 4)}) == std::pair(16, 4));
}

TEST_CASE("a copy that the kernel's table has no room for is made by LibTorch") {
  const Tile boxes(6, one_interval(0, 2));
  const std::vector<int64_t> sizes(6, 3);
  const Region region(boxes, sizes);
  const at::Tensor from = numbers(sizes, at::kDouble), packed = at::zeros({64}, at::kDouble);
  bool taken = true;
  region.pack(from, packed, 0, [&](const StridedCopy& part) {
    taken = copy_request(part).has_value();
    copy_part(part);
  });
  CHECK_FALSE(taken);
  at::Tensor want = from;
  for (int64_t d = 0; d < 6; ++d) want = want.narrow(d, 0, 2);
  CHECK(packed.equal(want.reshape({-1})));
  // More words than 32 bits count; nothing is read, since the tensors have one element.
  const at::Tensor one = at::zeros({1}, at::kByte);
  const std::vector<int64_t> many = {int64_t{1} << 16, int64_t{1} << 16}, strides = {0, 0};
  CHECK_FALSE(copy_request({one, 0, strides, one, 0, strides, many}));
}

TEST_CASE("on the CPU each copy is made when it is given, and run() has nothing left to do") {
  const at::Tensor from = numbers({4, 6}, at::kFloat), packed = at::zeros({8});
  const Region region({one_interval(0, 4), one_interval(1, 3)}, {4, 6});
  Copies copies;
  region.pack(from, packed, 0, copies);
  CHECK(packed.equal(from.slice(1, 1, 3).reshape({-1})));
  copies.run();
  CHECK(packed.equal(from.slice(1, 1, 3).reshape({-1})));
}

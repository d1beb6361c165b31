#include "tessera/mesh/core/reused_memory.h"

#include <vector>

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <doctest/doctest.h>

using tessera::reusable_bytes;
using tessera::reused_copy;
using tessera::reused_empty;

namespace {

constexpr int64_t kFloats = 64 << 10;  // 256 KiB

const void* place_of(const at::Tensor& tensor) { return tensor.const_data_ptr(); }

}  // namespace

TEST_CASE("reused_empty: memory comes back when its last holder is gone, and not before") {
  at::Tensor first = reused_empty({kFloats}, at::kFloat);
  const void* const place = place_of(first);
  at::Tensor view = first.view({2, -1})[1];
  first.reset();
  CHECK(place_of(reused_empty({kFloats}, at::kFloat)) != place);  // the view still uses it
  const std::size_t before = reusable_bytes();
  view.reset();
  CHECK(reusable_bytes() == before + kFloats * 4);
}

TEST_CASE("reused_empty: as many bytes of another shape and dtype, contiguous and of that dtype") {
  const void* place = nullptr;
  {
    const at::Tensor first = reused_empty({3, kFloats}, at::kFloat);
    place = place_of(first);
  }
  const at::Tensor second = reused_empty({kFloats, 3, 1}, at::kInt);
  CHECK(place_of(second) == place);
  CHECK(second.sizes() == at::IntArrayRef({kFloats, 3, 1}));
  CHECK(second.is_contiguous());
  CHECK((second.scalar_type() == at::kInt));
  CHECK(second.storage().nbytes() == 3 * kFloats * 4);
  CHECK(second.fill_(7).sum().item<int64_t>() == 21 * kFloats);
  CHECK(place_of(reused_empty({2, kFloats}, at::kFloat)) != place);
}

TEST_CASE("reused_empty: under autograd and InferenceMode it is as at::empty is") {
  { const at::Tensor made = reused_empty({5, kFloats}, at::kFloat); }
  {
    const c10::InferenceMode inference;
    CHECK(reused_empty({5, kFloats}, at::kFloat).is_inference());
  }
  at::Tensor normal = reused_empty({5, kFloats}, at::kFloat);
  CHECK(!normal.is_inference());
  normal.fill_(2).requires_grad_();
  (normal * 3).sum().backward();
  CHECK(normal.grad().eq(3).all().item<bool>());
}

TEST_CASE("reused_copy: the elements, apart from the tensor's") {
  const at::Tensor from = at::arange(2 * kFloats, at::kFloat).view({2, -1}).t();
  const at::Tensor copy = reused_copy(from);
  CHECK(copy.is_contiguous());
  CHECK(at::equal(copy, from));
  CHECK(!copy.is_alias_of(from));
}

TEST_CASE("reused_empty: small and very large tensors are not kept, and no more than 128 MiB are") {
  const std::size_t before = reusable_bytes();
  { const at::Tensor small = reused_empty({1000}, at::kFloat); }
  { const at::Tensor large = reused_empty({(64 << 20) + 1}, at::kByte); }
  CHECK(reusable_bytes() == before);
  {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 5; ++i) many.push_back(reused_empty({(40 << 20) + i}, at::kByte));
  }
  CHECK(reusable_bytes() > 100 << 20);
  CHECK(reusable_bytes() <= 128 << 20);
}

TEST_CASE("reused_empty: memory whose holder put another in its place is not given out") {
  {
    at::Tensor resized = reused_empty({7, kFloats}, at::kFloat);
    resized.resize_({9, kFloats});
    resized.fill_(1);
  }
  const at::Tensor next = reused_empty({7, kFloats}, at::kFloat);
  CHECK(next.storage().nbytes() == 7 * kFloats * 4);
  CHECK(next.fill_(1).sum().item<double>() == 7 * kFloats);
}

TEST_CASE("reused_copy: of zeros without memory, conjugates and negatives") {
  const at::Tensor complex = at::complex(at::ones({2, 3}), at::arange(6.0).view({2, 3}));
  const at::Tensor zeros = at::_efficientzerotensor({2, 3}, at::kFloat);
  CHECK(at::equal(reused_copy(zeros), at::zeros({2, 3})));
  CHECK(at::equal(at::imag(reused_copy(complex.conj())), -at::arange(6.0).view({2, 3})));
  CHECK(at::equal(reused_copy(at::imag(complex.conj())), -at::arange(6.0).view({2, 3})));
}

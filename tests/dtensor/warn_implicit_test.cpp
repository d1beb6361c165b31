#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tests/dtensor/io/logged.h"

using namespace tessera;

namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace

TEST_CASE("WarnImplicit names what communicates on its own, each once; explicit communication says nothing") {
  const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"tp"}, World::fake(0, 3));
  const at::Tensor x = distribute_tensor(at::ones({6, 6}), mesh, {Shard(0)}, kNoSource);
  const at::Tensor y = distribute_tensor(at::ones({6, 6}), mesh, {Shard(1)}, kNoSource);
  const std::string text = logged([&] {
    const WarnImplicit guard;
    for (int i = 0; i < 3; ++i) at::mm(x, y);
    at::_foreach_add(std::vector<at::Tensor>{x}, std::vector<at::Tensor>{y});
    at::relu(x);
    full_tensor(x);
  });
  CAPTURE(text);
  CHECK(count(text, "communicates on its own") == 2);
  CHECK(count(text, "aten::mm: communicates on its own; Float [6, 6] on {tp: 3} on cpu as [S(1)] would go to [R]") ==
        1);
  CHECK(count(text, "aten::_foreach_add: communicates on its own") == 1);
}

TEST_CASE("WarnImplicit ends with its guard, and one inside another may lift it") {
  const DeviceMesh mesh = init_device_mesh("cpu", {3}, {"tp"}, World::fake(0, 3));
  const at::Tensor x = distribute_tensor(at::ones({6, 6}), mesh, {Shard(0)}, kNoSource);
  const std::string text = logged([&] {
    {
      const WarnImplicit guard;
      CHECK(WarnImplicit::enabled());
      const WarnImplicit lifted(false);
      CHECK(!WarnImplicit::enabled());
      at::softmax(x, 0);
    }
    at::softmax(x, 0);
  });
  CHECK(text.empty());
}

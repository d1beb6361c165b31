#include <doctest/doctest.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

TEST_CASE("LibTorch, c10d with Gloo and spdlog link into one program") {
  spdlog::debug("not shown");
  CHECK(at::ones({2, 3}).sum().item<double>() == 6.0);
  CHECK(c10d::ProcessGroupGloo::Options::create()->threads == 2);
}

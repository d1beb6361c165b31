// Checks that the results of operators on DTensors lie in memory in the order of LibTorch's, whatever the order of
// their inputs is: else a view that LibTorch allows would throw, or would be a copy.

#include <array>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/core/tensor_lists.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/operators/calls.h"

namespace tessera::testing {
namespace {

using Tensors = std::vector<at::Tensor>;
// Returns an argument, whose place among the arguments is given, in another order.
using Reorder = at::Tensor (*)(const at::Tensor&, std::size_t place);

at::Tensor swapped(const at::Tensor& t, int64_t a, int64_t b) { return t.transpose(a, b).contiguous().transpose(a, b); }

at::Tensor channels_last(const at::Tensor& t) {
  if (t.dim() == 4) return t.contiguous(at::MemoryFormat::ChannelsLast);
  return t.dim() == 5 ? t.contiguous(at::MemoryFormat::ChannelsLast3d) : t;
}

constexpr std::array<Reorder, 6> kReorders = {
    [](const at::Tensor& t, std::size_t) { return t; },
    [](const at::Tensor& t, std::size_t) { return t.dim() > 1 ? swapped(t, 0, -1) : t; },
    [](const at::Tensor& t, std::size_t) { return t.dim() > 2 ? swapped(t, 0, 1) : t; },
    [](const at::Tensor& t, std::size_t) { return channels_last(t); },
    [](const at::Tensor& t, std::size_t place) { return place == 0 ? channels_last(t) : t; },
    [](const at::Tensor& t, std::size_t place) { return place == 1 ? channels_last(t) : t; }};

// Lists operators whose results lie otherwise.
const std::set<std::string>& exceptions() {
  static const std::set<std::string> names = {
      // LibTorch's results are column-major, as LAPACK writes them.
      "aten::_cholesky_solve_helper", "aten::cholesky", "aten::cholesky_inverse", "aten::linalg_eig",
      "aten::linalg_householder_product", "aten::linalg_solve_triangular", "aten::orgqr", "aten::ormqr",
      // LibTorch's order depends on the dimensions that are transformed.
      "aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c", "aten::fft_fft2", "aten::fft_fftn", "aten::fft_ifft2",
      "aten::fft_ifftn", "aten::fft_ihfft2", "aten::fft_ihfftn", "aten::stft",
      // LibTorch's order depends on the kernel that it picks.
      "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
      "aten::scaled_dot_product_attention",
      // The results of one overload are row-major, and those of the others are not.
      "aten::_foreach_pow",
      // It is composed of other operators.
      "aten::one_hot"};
  return names;
}

Tensors copies(const Tensors& tensors) {
  Tensors out;
  for (const at::Tensor& t : tensors) out.push_back(t.defined() ? t.clone() : t);
  return out;
}

// Says whether elements that are next to each other in one are so in the other.
bool in_same_order(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined() || b.numel() == 0) return true;
  for (int64_t d = 0; d < b.dim(); ++d) {
    if (b.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

bool writes_any(const WholeCall& call) {
  bool out = false;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) out |= call.writes(j);
  return out;
}

struct Results {
  Tensors want, got;
};

// Returns nothing where the tensors' new order makes plain tensors or DTensors refuse the call.
std::optional<Results> results_of(const Sample& sample, const DeviceMesh& mesh) {
  try {
    const WholeCall call(sample);
    if (call.random() || writes_any(call)) return std::nullopt;
    Tensors inputs;
    for (const at::Tensor& t : call.tensors()) {
      inputs.push_back(t.defined() ? from_local(t.clone(), mesh, {Replicate()},
                                                {.shape = t.sizes().vec(), .stride = t.strides().vec()})
                                   : t);
    }
    Results out;
    out.want = call.run(call.args_with(copies(call.tensors())));
    out.got = call.run(call.args_with(inputs));
    return out;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Returns which result lies otherwise; "" if none does.
std::string problem(Sample sample, Reorder reorder, const DeviceMesh& mesh, int64_t& compared) {
  for (std::size_t i = 0; i < sample.args.size(); ++i) {
    detail::replace_tensors(sample.args[i],
                            [&](const at::Tensor& t, std::size_t) { return t.defined() ? reorder(t, i) : t; });
  }
  const std::optional<Results> results = results_of(sample, mesh);
  if (!results) return {};
  ++compared;
  const auto& [want, got] = *results;
  for (std::size_t k = 0; k < want.size() && k < got.size(); ++k) {
    if (in_same_order(got[k], want[k])) continue;
    return fmt::format("{} result {}: strides [{}], LibTorch's are [{}]", sample.op, k,
                       fmt::join(got[k].strides(), ", "), fmt::join(want[k].strides(), ", "));
  }
  return {};
}

std::string base_of_overload(const std::string& overload) { return overload.substr(0, overload.find('.')); }

}  // namespace

TEST_CASE("results lie in memory in LibTorch's order, for row-major, turned and channels-last inputs") {
  run_in_process(1, [](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh(device_name(), {1}, {}, world);
    const at::NoGradGuard no_grad;
    std::set<std::string> otherwise;
    int64_t compared = 0;
    for (const std::string& overload : tensor_overloads()) {
      if (!out_of_scope(overload).empty()) continue;
      for (const Sample& sample : calls_of(overload)) {
        for (const Reorder reorder : kReorders) {
          const std::string text = problem(sample, reorder, mesh, compared);
          if (text.empty()) continue;
          otherwise.insert(base_of_overload(overload));
          CHECK_MESSAGE(exceptions().contains(base_of_overload(overload)), text);
        }
      }
    }
    CHECK(otherwise == exceptions());  // one that is right now is taken from the list
    CHECK(compared > 6000);
  });
}

}  // namespace tessera::testing

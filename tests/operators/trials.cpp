#include "tessera/tests/operators/trials.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <random>
#include <thread>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/ops/rules/pieces.h"

namespace tessera::testing {
namespace {

std::string innermost(const std::exception& error) {
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    return innermost(nested);
  } catch (...) {
  }
  const std::string text = error.what();
  return text.substr(0, std::min<std::size_t>(text.find('\n'), 400));
}

// Returns the two values that differ most, where that is a number.
std::string example(const at::Tensor& mine, const at::Tensor& whole) {
  if (!whole.is_floating_point() || whole.numel() == 0) return {};
  const at::Tensor a = mine.detach().flatten().to(at::kCPU, at::kDouble);
  const at::Tensor b = whole.detach().flatten().to(at::kCPU, at::kDouble);
  const int64_t at = (a - b).abs().nan_to_num(1e300).argmax().item<int64_t>();
  return fmt::format(" ({} for {} at {})", a[at].item<double>(), b[at].item<double>(), at);
}

// Judges a run: what each rank found wrong, the error that each threw, and the run's own error; "" where there is none.
// A rank that found something wrong has left, which makes the others throw.
Finding finding_of(const std::vector<std::string>& wrong, const std::vector<std::string>& thrown,
                   const std::string& failure) {
  const auto found = std::ranges::find_if(wrong, [](const std::string& text) { return !text.empty(); });
  if (found != wrong.end()) return {.verdict = Verdict::kWrong, .text = *found};
  if (failure.empty()) return {};
  const bool alike = std::ranges::all_of(thrown, [&](const std::string& text) { return text == thrown.front(); });
  return {.verdict = alike ? Verdict::kRefused : Verdict::kRefusedByOne,
          .text = alike ? failure : "not every rank throws: " + failure};
}

// Waits until all ranks have ended, or, where one waits for this one, for two seconds: what a rank throws ends the
// others' collectives, also those that would have come to an end.
void wait_for_all(const std::atomic<std::size_t>& ended, std::size_t ranks) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (ended < ranks && std::chrono::steady_clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

std::string to_string(const Trial& trial) {
  std::string out = fmt::format("on {{{}}}:", fmt::join(trial.mesh_shape, ", "));
  for (const Placements& p : trial.layouts) out += ' ' + to_string(p);
  return out;
}

Placements candidates(const at::Tensor& t, bool written, bool random) {
  Placements out = {Replicate()};
  for (int64_t d = 0; d < t.dim(); ++d) out.push_back(Shard(d));
  if (t.dim() > 0 && !written) out.push_back(BlockCyclic(0, 1));
  if (written && random) return out;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProduct, ReduceOp::kAvg}) {
    if (can_be_partial(t.scalar_type(), op)) out.push_back(Partial(op));
  }
  return out;
}

std::vector<Trial> trials(const WholeCall& call, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Placements> of_each;
  for (std::size_t j = 0; j < call.tensors().size(); ++j) {
    const at::Tensor& t = call.tensors()[j];
    if (!t.defined()) {
      of_each.push_back({Replicate()});
    } else if (call.is_flag(j)) {
      of_each.push_back({Replicate(), Partial(ReduceOp::kMax), Partial(ReduceOp::kMin)});
    } else {
      of_each.push_back(candidates(t, call.writes(j), call.random()));
    }
  }
  std::vector<Trial> out;
  if (of_each.empty()) return out;
  const auto draw = [&](std::size_t j) { return of_each[j][random() % of_each[j].size()]; };
  for (const int64_t ranks : {2, 3}) {
    for (const Placement& first : of_each[0]) {
      Trial trial{.layouts = {}, .mesh_shape = {ranks}};
      for (std::size_t j = 0; j < of_each.size(); ++j) trial.layouts.push_back({j == 0 ? first : draw(j)});
      out.push_back(std::move(trial));
    }
  }
  for (const std::vector<int64_t>& mesh_shape : {std::vector<int64_t>{4}, {2, 2}, {2, 2}}) {
    Trial trial{.layouts = std::vector<Placements>(of_each.size()), .mesh_shape = mesh_shape};
    for (std::size_t j = 0; j < of_each.size(); ++j) {
      for (std::size_t i = 0; i < mesh_shape.size(); ++i) trial.layouts[j].push_back(draw(j));
    }
    if (std::all_of(trial.layouts.begin(), trial.layouts.end(), partials_commute)) out.push_back(std::move(trial));
  }
  return out;
}

Trial one_rank(const WholeCall& call) {
  return {.layouts = std::vector<Placements>(call.tensors().size(), Placements{Replicate()}), .mesh_shape = {1}};
}

Placed::Placed(const std::vector<at::Tensor>& wholes, const Trial& trial) : wholes_(wholes), layouts_(trial.layouts) {
  for (std::size_t j = 0; j < wholes_.size(); ++j) {
    pieces_.push_back(wholes_[j].defined() ? distribute(wholes_[j], layouts_[j], trial.mesh_shape)
                                           : std::vector<at::Tensor>());
  }
}

std::vector<at::Tensor> Placed::on(const DeviceMesh& mesh, std::size_t rank) const {
  std::vector<at::Tensor> out;
  for (std::size_t j = 0; j < wholes_.size(); ++j) {
    const at::Tensor& whole = wholes_[j];
    out.push_back(whole.defined()
                      ? from_local(pieces_[j][rank].contiguous(), mesh, layouts_[j],
                                   {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()})
                      : whole);
  }
  return out;
}

Finding on_ranks(const Trial& trial, const std::function<std::string(const DeviceMesh&, std::size_t)>& body) {
  clear_dispatch_cache();
  const uint64_t before = dispatch_statistics().replicated;
  const std::size_t ranks = num_ranks(trial.mesh_shape);
  std::vector<std::string> wrong(ranks), thrown(ranks);
  std::atomic<std::size_t> ended{0};
  std::string failure;
  try {
    run_in_process(static_cast<int64_t>(ranks), [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh(device_name(), trial.mesh_shape, {}, world);
      const auto rank = static_cast<std::size_t>(world->rank());
      try {
        wrong[rank] = body(mesh, rank);
      } catch (const std::exception& error) {
        thrown[rank] = innermost(error);
        ++ended;
        wait_for_all(ended, ranks);
        throw;
      }
      ++ended;
    });
  } catch (const std::exception& error) {
    failure = innermost(error);
  }
  Finding out = finding_of(wrong, thrown, failure);
  if (out.verdict == Verdict::kByRule && dispatch_statistics().replicated != before) out.verdict = Verdict::kReplicated;
  if (out.verdict != Verdict::kByRule) out.text += "; " + to_string(trial);
  return out;
}

std::string compare_tensor(const at::Tensor& mine, const at::Tensor& whole, bool values) {
  if (mine.defined() != whole.defined()) return "is defined or not";
  if (!whole.defined()) return {};
  const at::Tensor full = is_dtensor(mine) ? full_tensor(mine) : mine;
  if (full.scalar_type() != whole.scalar_type()) {
    return fmt::format("is {}, not {}", c10::toString(full.scalar_type()), c10::toString(whole.scalar_type()));
  }
  if (full.sizes() != whole.sizes()) return "has other sizes";
  return !values || same_values(full, whole) ? std::string() : "has other values" + example(full, whole);
}

}  // namespace tessera::testing

// Runs unmodified models of torchvision and transformers, traced by trace_models.py when the test starts, on DTensors,
// and compares results, gradients of inputs and parameters, and buffers with plain tensors. models.json lists what each
// setup gives.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/script.h>
#include <torch/utils.h>

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/script_module.h"
#include "tessera/tests/everyday/outcome.h"
#include "tessera/tests/harness/shell.h"

namespace tessera::testing {
namespace {

using Json = nlohmann::ordered_json;

// In float64, relative to the largest element: a model has some hundred sums whose order differs.
constexpr double kTolerance = 1e-9;

struct Model {
  std::string name;
  std::string file;
  Tensors inputs;
  ParallelPlan plan;
  Json row;
};

// The mesh and the layouts with which a model runs.
struct Setup {
  std::string name;
  std::vector<int64_t> mesh_shape;
  Placements inputs;
  Placement parameters = Replicate();  // where no plan sets another
  bool planned = false;
};

// Batches have 3 items. "places" are the height of images, the frames of clips, the length of texts.
std::vector<Setup> setups_of(const Model& model) {
  const int64_t place = model.inputs[0].dim() > 3 ? 2 : 1;
  const bool planned = !model.plan.empty();
  std::vector<Setup> setups = {
      {"batch", {2}, {Shard(0)}}, {"places", {2}, {Shard(place)}}, {"parameters", {3}, {Replicate()}, Shard(0)}};
  if (planned) setups.push_back({"plan", {2}, {Replicate()}, Replicate(), true});
  setups.push_back(
      {"2 x 2", {2, 2}, {Shard(0), planned ? Placement(Replicate()) : Placement(Shard(place))}, Replicate(), planned});
  return setups;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) throw std::runtime_error(fmt::format("{} is not set; see BUILD.bazel", name));
  return value;
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(fmt::format("{} cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

ParallelPlan plan_of(const Json& patterns) {
  ParallelPlan plan;
  for (const auto& [pattern, style] : patterns.items()) {
    if (style == "columns") {
      plan.emplace_back(pattern, ColwiseParallel());
    } else if (style == "rows") {
      plan.emplace_back(pattern, RowwiseParallel());
    } else {
      throw std::runtime_error(
          fmt::format("models.json: {}: {} is no style; columns and rows are", pattern, style.dump()));
    }
  }
  return plan;
}

// Returns the tensors of a tensor, a tuple or a list.
Tensors tensors_of(const at::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  Tensors tensors;
  for (const at::IValue& each : value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec())
    tensors.push_back(each.toTensor());
  return tensors;
}

Model read_model(const std::string& name, const Json& row, const std::string& folder) {
  const std::string path = folder + "/" + name, pickled = contents(path + ".inputs");
  const at::IValue inputs = torch::jit::pickle_load({pickled.begin(), pickled.end()});
  return {.name = name,
          .file = path + ".pt",
          .inputs = tensors_of(inputs),
          .plan = plan_of(row.value("plan of", Json::object())),
          .row = row};
}

// Returns the models of FAMILY, traced. A missing package of tools/setup --full is a failure.
std::vector<Model> traced_models() {
  const std::string folder = environment("TEST_TMPDIR") + "/models", source = environment("TRACE_MODELS");
  const Json rows = Json::parse(contents(environment("MODELS"))).at(environment("FAMILY"));
  std::string names;
  for (const auto& [name, row] : rows.items()) names += " " + name;
  const ShellOutcome traced = shell(fmt::format("'{}' '{}' '{}'{}", environment("PYTHON"), source, folder, names));
  if (traced.exit_code != 0) throw std::runtime_error(fmt::format("{} failed:\n{}", source, traced.output));
  std::vector<Model> models;
  for (const auto& [name, row] : rows.items()) models.push_back(read_model(name, row, folder));
  return models;
}

Outcome outcome_of(const torch::jit::Module& module, const Tensors& inputs,
                   const std::function<at::IValue(std::vector<at::IValue>)>& forward) {
  Outcome out{.results = tensors_of(forward({inputs.begin(), inputs.end()})), .grads = {}, .collectives = {}};
  loss_of(out.results).backward();
  for (const at::Tensor& t : inputs) out.grads.push_back(whole_of(t.grad()));
  for (const at::Tensor& p : module.parameters()) out.grads.push_back(whole_of(p.grad()));
  for (const at::Tensor& b : module.buffers()) out.results.push_back(b);
  for (at::Tensor& t : out.results) t = whole_of(t.detach());
  return out;
}

Outcome run_plain(const Model& model) {
  torch::jit::Module module = torch::jit::load(model.file);
  Tensors inputs;
  for (const at::Tensor& t : model.inputs) inputs.push_back(t.clone().requires_grad_(t.is_floating_point()));
  return outcome_of(module, inputs, [&](std::vector<at::IValue> in) { return module.forward(std::move(in)); });
}

// Shards each parameter that has the dimension. Tied parameters are one tensor with two names.
void distribute_tensors(const torch::jit::Module& module, const DeviceMesh& mesh, const Placement& parameters) {
  Placements replicated(static_cast<std::size_t>(mesh.ndim()), Replicate()), cut = replicated;
  cut.back() = parameters;
  for (const at::Tensor& p : module.parameters()) {
    if (!is_dtensor(p)) distribute_in_place(p, mesh, p.dim() > 0 ? cut : replicated, kNoSource);
  }
  for (const at::Tensor& b : module.buffers()) {
    if (!is_dtensor(b)) distribute_in_place(b, mesh, replicated, kNoSource);
  }
}

Outcome run_rank(const Model& model, const Setup& setup, const DeviceMesh& mesh) {
  torch::jit::Module module = torch::jit::load(model.file);
  Tensors inputs;
  for (const at::Tensor& t : model.inputs)
    inputs.push_back(
        distribute_tensor(t, mesh, setup.inputs, kNoSource).detach().requires_grad_(t.is_floating_point()));
  std::optional<ParallelizedScript> parallelized;
  if (setup.planned) {
    parallelized.emplace(parallelize_module(module, mesh, model.plan, {.src_rank = kNoSource}));
  } else {
    distribute_tensors(module, mesh, setup.parameters);
  }
  const ImplicitReplication guard;
  return outcome_of(module, inputs, [&](std::vector<at::IValue> in) {
    return setup.planned ? parallelized->forward(std::move(in)) : module.forward(std::move(in));
  });
}

// ---- Outcomes, compared with models.json

double difference(const at::Tensor& mine, const at::Tensor& plain) {
  if (mine.sizes() != plain.sizes() || mine.scalar_type() != plain.scalar_type()) return HUGE_VAL;
  if (plain.numel() == 0) return 0;
  const at::Tensor wanted = plain.to(at::kDouble), off = (mine.to(at::kDouble) - wanted).abs().max();
  return (off / wanted.abs().max().clamp_min(1e-3)).item<double>();
}

std::string differing(const char* what, const Tensors& mine, const Tensors& plain) {
  if (mine.size() != plain.size()) return fmt::format("{} {}s, plain {}", mine.size(), what, plain.size());
  for (std::size_t k = 0; k < plain.size(); ++k) {
    // A missing gradient is zero.
    const at::Tensor& other = mine[k].defined() ? mine[k] : plain[k];
    if (!other.defined()) continue;
    const at::Tensor none = at::zeros_like(other);
    const double off = difference(mine[k].defined() ? mine[k] : none, plain[k].defined() ? plain[k] : none);
    if (!(off <= kTolerance)) return fmt::format("{} {} is off by {:.2g} of its largest element", what, k, off);
  }
  return "right";
}

std::string verdict(const Outcome& mine, const Outcome& plain) {
  const std::string results = differing("result", mine.results, plain.results);
  return results != "right" ? results : differing("gradient", mine.grads, plain.grads);
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// Returns "right", what differs, or the error.
std::string run(const Model& model, const Setup& setup, const Outcome& plain) {
  std::mutex mutex;
  std::string came = "right";
  try {
    run_in_process(c10::multiply_integers(setup.mesh_shape), [&](const std::shared_ptr<World>& world) {
      const std::vector<std::string> names =
          setup.mesh_shape.size() == 1 ? std::vector<std::string>{"tp"} : std::vector<std::string>{"dp", "tp"};
      const DeviceMesh mesh = init_device_mesh("cpu", setup.mesh_shape, names, world);
      const std::string rank = verdict(run_rank(model, setup, mesh), plain);
      const std::lock_guard lock(mutex);
      if (rank != "right") came = rank;
    });
  } catch (const std::exception& error) {
    came = "refused: " + one_line(message(error));
  }
  return came;
}

// Says whether `came` is what the table says: "right", or {"refused": part of the text, "why": the reason}.
bool as_told(const std::string& came, const Json& told) {
  if (told == "right") return came == "right";
  if (!told.is_object() || told.value("why", "").empty()) return false;
  return came.starts_with("refused: ") && came.find(told.at("refused").get<std::string>()) != std::string::npos;
}

void check(const Model& model) {
  const Outcome plain = run_plain(model);
  for (const Setup& setup : setups_of(model)) {
    const auto start = std::chrono::steady_clock::now();
    const std::string came = run(model, setup, plain);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cout << fmt::format("ROW {} | {} | {:.1f} s | {}\n", model.name, setup.name, took.count(), came) << std::flush;
    CHECK_MESSAGE(as_told(came, model.row.value(setup.name, Json())),
                  fmt::format("{}, {}: models.json says {}, and it was {}", model.name, setup.name,
                              model.row.value(setup.name, Json()).dump(), came));
  }
}

TEST_CASE(
    "models equal one process, forward and backward: batch, places or parameters cut, by a plan, and on 2 x 2 ranks") {
  // As in the script, since traced code makes tensors without naming a dtype.
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  for (const Model& model : traced_models()) check(model);
}

}  // namespace
}  // namespace tessera::testing

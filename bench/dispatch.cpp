// What a DTensor adds to an operator's time, beside what PyTorch's DTensor adds to its own: cached decisions, no real
// communication (a fake group of 8 ranks), tensors of 8x8.

#include <cstdlib>
#include <iostream>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "tessera/bench/measure.h"
#include "tessera/dtensor/dtensor.h"

namespace {

using tessera::bench::Row;
using tessera::bench::Subject;

// The tensors of one side: DTensors or plain ones, by the same names.
struct Tensors {
  at::Tensor a, b, right, bias, w1, w2, x;
};

at::Tensor mlp(const Tensors& t) {
  const at::Tensor hidden = at::gelu(at::mm(t.x, t.w1.t()));
  const at::Tensor y = at::mm(hidden, t.w2.t());
  return tessera::is_dtensor(y) ? tessera::redistribute(y, {tessera::Replicate()}) : y;
}

void mlp_step(const Tensors& t) {
  mlp(t).sum().backward();
  t.w1.mutable_grad().reset();
  t.w2.mutable_grad().reset();
}

Tensors plain_tensors() {
  return {.a = at::randn({8, 8}),
          .b = at::randn({8, 8}),
          .right = at::randn({8, 8}),
          .bias = at::randn({8}),
          .w1 = at::randn({16, 8}),
          .w2 = at::randn({8, 16}),
          .x = at::randn({8, 8})};
}

Tensors on_mesh(const Tensors& plain, const tessera::DeviceMesh& mesh) {
  using namespace tessera;
  const auto put = [&](const at::Tensor& t, const Placement& p) { return distribute_tensor(t, mesh, {p}, kNoSource); };
  return {.a = put(plain.a, Shard(0)),
          .b = put(plain.b, Shard(0)),
          .right = put(plain.right, Replicate()),
          .bias = put(plain.bias, Replicate()),
          .w1 = put(plain.w1, Shard(0)),
          .w2 = put(plain.w2, Shard(1)),
          .x = put(plain.x, Replicate())};
}

std::function<void()> without_grad(std::function<void()> body) {
  return [body = std::move(body)] {
    const c10::AutoGradMode guard(false);
    body();
  };
}

// The same call on ours and on plain pieces of the same size.
Subject pair(const std::string& name, const std::function<void(const Tensors&)>& call, const Tensors& ours,
             const Tensors& plain) {
  return {.name = name, .ours = without_grad([=] { call(ours); }), .plain = without_grad([=] { call(plain); })};
}

// What a redistribution costs beside its communication: this world moves nothing.
std::vector<Subject> redistributions(const Tensors& ours, const tessera::DeviceMesh& mesh) {
  using namespace tessera;
  const at::Tensor partial = from_local(to_local(ours.right), mesh, {Partial()});
  std::vector<Subject> out;
  const auto add = [&](const char* name, const at::Tensor& from, const Placement& to) {
    out.push_back({.name = name, .ours = without_grad([=] { redistribute(from, {to}); }), .peer_plain = false});
  };
  add("S(0)_to_itself", ours.a, Shard(0));
  add("R_to_S(0)", ours.right, Shard(0));
  add("S(0)_to_R", ours.a, Replicate());
  add("S(0)_to_S(1)", ours.a, Shard(1));
  add("P_to_S(0)", partial, Shard(0));
  add("P_to_R", partial, Replicate());
  return out;
}

std::vector<Subject> subjects(const Tensors& plain, const tessera::DeviceMesh& mesh) {
  const Tensors ours = on_mesh(plain, mesh);
  // What the local operator works on: the peer's plain figures are of the same pieces.
  const Tensors pieces{.a = tessera::to_local(ours.a),
                       .b = tessera::to_local(ours.b),
                       .right = tessera::to_local(ours.right),
                       .bias = tessera::to_local(ours.bias),
                       .w1 = tessera::to_local(ours.w1),
                       .w2 = tessera::to_local(ours.w2),
                       .x = tessera::to_local(ours.x)};
  std::vector<Subject> out;
  out.push_back(pair(
      "add", [](const Tensors& t) { at::add(t.a, t.b); }, ours, pieces));
  out.push_back(pair(
      "mm", [](const Tensors& t) { at::mm(t.a, t.right); }, ours, pieces));
  out.push_back(pair(
      "view",
      [](const Tensors& t) {
        (void)t.a.view({t.a.size(0), 2, 4});
      },
      ours, pieces));
  out.push_back(pair(
      "detach", [](const Tensors& t) { (void)t.a.detach(); }, ours, pieces));
  out.push_back(pair(
      "add_", [](const Tensors& t) { t.a.add_(t.b); }, ours, pieces));
  out.push_back(pair(
      "layer_norm", [](const Tensors& t) { at::layer_norm(t.a, {8}, t.bias, t.bias); }, ours, pieces));
  const at::Tensor local = pieces.a;
  out.push_back({.name = "from_local",
                 .ours = without_grad([=] { tessera::from_local(local, mesh, {tessera::Shard(0)}); }),
                 .peer_plain = false});
  for (Subject& each : redistributions(ours, mesh)) out.push_back(std::move(each));
  const auto with_grad = [](Tensors t) {
    t.w1 = t.w1.detach().requires_grad_();
    t.w2 = t.w2.detach().requires_grad_();
    return t;
  };
  const Tensors ours_grad = with_grad(ours);
  const Tensors plain_grad = with_grad(pieces);
  out.push_back({.name = "mlp", .ours = [=] { mlp_step(ours_grad); }, .plain = [=] { mlp_step(plain_grad); }});
  return out;
}

void print(const std::vector<Row>& rows) {
  fmt::print("{:<14}{:>9}{:>9}{:>9}{:>12}{:>9}{:>9}{:>9}{:>8}\n", "us a call", "ours", "plain", "added", "(quartiles)",
             "peer", "plain", "added", "ratio");
  for (const Row& r : rows) {
    const double ours = r.ours.median - r.plain.median;
    const double theirs = r.peer.median - r.peer_plain.median;
    fmt::print("{:<14}{:>9.2f}{:>9.2f}{:>9.2f}{:>12}{:>9.2f}{:>9.2f}{:>9.2f}{:>8.1f}\n", r.name, r.ours.median,
               r.plain.median, ours, fmt::format("{:.2f}-{:.2f}", r.ours.low - r.plain.median, r.ours.high - r.plain.median),
               r.peer.median, r.peer_plain.median, theirs, ours > 0 ? theirs / ours : 0);
  }
  fmt::print("ratio: what the peer (PyTorch's DTensor) adds over what ours adds\n");
}

// Of a redistribution, which has no operator beside it.
std::vector<tessera::bench::Goal> goals_of(const std::vector<Row>& rows) {
  constexpr double kMost = 3;  // us
  std::vector<tessera::bench::Goal> out;
  for (const Row& r : rows) {
    if (r.name.find("_to_") == std::string::npos) continue;
    out.push_back(
        {fmt::format("{}: at most {} us of our own: {:.2f}", r.name, kMost, r.ours.median), r.ours.median <= kMost});
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("What a DTensor adds to an operator's time, beside PyTorch's DTensor");
  std::string json;
  int rounds = 51;
  int calls = 200;
  std::string peer_script;
  std::string only;
  bool check = false;
  app.add_flag("--check", check, "fail where a goal is missed");
  app.add_option("--only", only, "measure this row alone");
  app.add_option("--json", json, "write the figures there too");
  app.add_option("--rounds", rounds, "interleaved rounds")->check(CLI::PositiveNumber);
  app.add_option("--calls", calls, "calls a round")->check(CLI::PositiveNumber);
  app.add_option("--peer", peer_script, "the peer's program")->envname("TESSERA_DISPATCH_PEER")->required();
  CLI11_PARSE(app, argc, argv);
  const char* python = std::getenv("TESSERA_PYTHON");
  at::set_num_threads(1);
  try {
    const auto world = tessera::World::fake(0, 8);
    const tessera::DeviceMesh mesh(world, c10::kCPU, tessera::Mesh({8}, {"tp"}));
    tessera::bench::Peer peer({python != nullptr ? python : "python3", peer_script});
    std::vector<Subject> wanted = subjects(plain_tensors(), mesh);
    if (!only.empty()) std::erase_if(wanted, [&](const Subject& s) { return s.name != only; });
    const std::vector<Row> rows = tessera::bench::measure(wanted, peer, rounds, calls);
    print(rows);
    const bool met = tessera::bench::print_goals(goals_of(rows));
    if (!json.empty()) tessera::bench::write_json(json, "dispatch", rows);
    if (check && !met) return 1;
  } catch (const std::exception& error) {
    std::cerr << "dispatch: " << error.what() << "\n";
    return 1;
  }
  return 0;
}

#include "tessera/bench/tp_block_rank.h"

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "tessera/bench/block.h"
#include "tessera/bench/measure.h"
#include "tessera/bench/rank_server.h"
#include "tessera/bench/raw_block.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/styles/parallelize.h"

namespace tessera::bench {
namespace {

const ParallelPlan kPlan = {
    {"qkv", ColwiseParallel()}, {"out", RowwiseParallel()}, {"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

at::Tensor local(const at::Tensor& t) { return is_dtensor(t) ? to_local(t.detach()) : t.detach(); }

// Returns a sum over values and their positions, and one over magnitudes. tp_block_peer.py computes the same.
std::string digest(const at::Tensor& t) {
  const at::Tensor places = at::arange(t.numel(), at::kLong).mul(2654435761).remainder(1009).sub(504).to(at::kDouble);
  const at::Tensor products = t.to(at::kDouble).flatten().mul(places);
  return fmt::format("{} {}", products.sum().item<double>(), products.abs().sum().item<double>());
}

// Holds one implementation of the block.
struct BlockWay {
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::vector<at::Tensor> parameters;
  at::Tensor x;
  at::Tensor gradient;  // the output's gradient

  void drop_gradients() {
    for (const at::Tensor& each : parameters) each.mutable_grad().reset();
    x.mutable_grad().reset();
  }
  at::Tensor step() {
    drop_gradients();
    at::Tensor y = forward(x);
    y.backward(gradient);
    return y;
  }
  std::string digests() {
    std::string out = digest(local(step()));
    out += " " + digest(local(x.grad()));
    for (const at::Tensor& each : parameters) out += " " + digest(local(each.grad()));
    return out;
  }
};

std::map<std::string, BlockWay> ways_of(const BlockSize& size, const DeviceMesh& mesh) {
  const std::vector<int64_t> sizes = {size.sequence, size.batch, size.hidden};
  const at::Tensor x = numbers(sizes, 100, 1), gradient = numbers(sizes, 101, 1);
  const auto leaf = [&] { return x.clone().requires_grad_(); };
  const auto whole = [&](const at::Tensor& t) { return from_local(t.clone(), mesh, {Replicate()}); };

  const auto raw = std::make_shared<RawBlock>(size, mesh);
  const auto layers = layers_block(size, mesh);
  fill_block(*layers, size, mesh);
  const auto plain = plain_block(size);
  const auto styled = std::make_shared<Parallelized<std::shared_ptr<PlainBlock>>>(
      parallelize_module(plain, mesh, kPlan, {.src_rank = kNoSource}));
  fill_block(*plain, size, mesh);
  return {{"hand", {[raw](const at::Tensor& in) { return raw->forward(in); }, raw->parameters(), leaf(), gradient}},
          {"layers",
           {[layers](const at::Tensor& in) { return layers->forward(in); }, layers->parameters(), leaf(), gradient}},
          {"styles",
           {[styled](const at::Tensor& in) { return (*styled)(in); }, plain->parameters(), whole(x).requires_grad_(),
            whole(gradient)}}};
}

}  // namespace

void serve_tp_block(const std::string& socket) {
  at::set_num_threads(1);
  const auto world = World::from_environment();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->size()}, {"tp"}, world);
  std::map<std::string, BlockWay> ways;
  serve(socket, *world, [&](const std::string& what, const std::string& rest) -> std::string {
    if (what == "case") {
      ways.clear();
      ways = ways_of(BlockSize::parse(rest), mesh);
      return "ok";
    }
    if (what == "digest") {
      const std::string out = ways.at(rest).digests();
      ways.at(rest).drop_gradients();
      return out;
    }
    BlockWay& way = ways.at(what);
    barrier(mesh, 0);
    const double time = time_calls([&] { way.step(); }, std::stoi(rest));
    way.drop_gradients();  // every implementation starts with the same free memory
    return fmt::format("{}", time);
  });
}

}  // namespace tessera::bench

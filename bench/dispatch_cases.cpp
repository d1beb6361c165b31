#include "tessera/bench/dispatch_cases.h"

#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/optim/adamw.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/recorder.h"

namespace tessera::bench {
namespace {

// Holds the tensors of one side, DTensors or plain ones, under the same names.
struct Tensors {
  at::Tensor a, b, right, bias, w1, w2, x, q;
  std::vector<at::Tensor> list;
};

template <class Put>
Tensors each(const Tensors& from, const Put& put) {
  Tensors to{.a = put(from.a, Shard(0)),
             .b = put(from.b, Shard(0)),
             .right = put(from.right, Replicate()),
             .bias = put(from.bias, Replicate()),
             .w1 = put(from.w1, Shard(0)),
             .w2 = put(from.w2, Shard(1)),
             .x = put(from.x, Replicate()),
             .q = put(from.q, Shard(1)),
             .list = {}};
  for (const at::Tensor& t : from.list) to.list.push_back(put(t, Shard(0)));
  return to;
}

Tensors on_mesh(const DeviceMesh& mesh) {
  Tensors whole{.a = at::randn({8, 8}),
                .b = at::randn({8, 8}),
                .right = at::randn({8, 8}),
                .bias = at::randn({8}),
                .w1 = at::randn({16, 8}),
                .w2 = at::randn({8, 16}),
                .x = at::randn({8, 8}),
                .q = at::randn({2, 8, 8, 8}),
                .list = {}};
  for (int i = 0; i < 100; ++i) whole.list.push_back(at::randn({8, 8}));
  return each(whole,
              [&](const at::Tensor& t, const Placement& p) { return distribute_tensor(t, mesh, {p}, kNoSource); });
}

Tensors pieces_of(const Tensors& ours) {
  return each(ours, [](const at::Tensor& t, const Placement&) { return to_local(t); });
}

// Returns a function that calls `body` under a Guard, which is made of `arguments`.
template <class Guard, class... Arguments>
std::function<void()> under(std::function<void()> body, Arguments... arguments) {
  return [=] {
    const Guard guard(arguments...);
    body();
  };
}

std::function<void()> without_grad(std::function<void()> body) {
  return under<c10::AutoGradMode>(std::move(body), false);
}

using Call = std::function<void(const Tensors&)>;

Case operator_case(const std::string& name, double most_added, const Call& call, const Tensors& ours,
                   const Tensors& plain) {
  return {
      .subject = {.name = name, .ours = without_grad([=] { call(ours); }), .plain = without_grad([=] { call(plain); })},
      .most_added = most_added};
}

std::vector<Case> operators(const Tensors& ours, const Tensors& plain) {
  std::vector<Case> out;
  const auto add = [&](const std::string& name, double most, const Call& call) {
    out.push_back(operator_case(name, most, call, ours, plain));
  };
  add("add", 0.5, [](const Tensors& t) { (void)at::add(t.a, t.b); });
  add("mm", 0.5, [](const Tensors& t) { (void)at::mm(t.a, t.right); });
  add("view", 0.5, [](const Tensors& t) { (void)t.a.view({t.a.size(0), 2, 4}); });
  add("detach", 0.5, [](const Tensors& t) { (void)t.a.detach(); });
  add("mul_by_a_number", 0.5, [](const Tensors& t) { (void)at::mul(t.a, 2.0); });
  add("add_", 0.5, [](const Tensors& t) { (void)t.a.add_(t.b); });
  add("cat_of_2", 1, [](const Tensors& t) { (void)at::cat({t.a, t.b}, 1); });
  add("layer_norm", 1, [](const Tensors& t) { (void)at::layer_norm(t.a, {8}, t.bias, t.bias); });
  add("softmax", 1, [](const Tensors& t) { (void)at::softmax(t.a, -1); });
  add("sdpa", 1, [](const Tensors& t) { (void)at::scaled_dot_product_attention(t.q, t.q, t.q); });
  out.back().subject.peer = false;  // PyTorch's DTensor has no rule for the CPU's kernel
  add("foreach_add_of_100", 10, [](const Tensors& t) { (void)at::_foreach_add(t.list, t.list); });
  return out;
}

// Returns calls as a serving program makes them: under InferenceMode, and with operands that are made anew each time.
std::vector<Case> serving(const Tensors& ours, const Tensors& plain) {
  std::vector<Case> out;
  const auto in_inference = [&](const Call& call, const Tensors& tensors) {
    return under<c10::InferenceMode>([=] { call(tensors); });
  };
  const auto add = [&](const std::string& name, double most, const Call& call) {
    Subject subject{.name = name, .ours = in_inference(call, ours), .plain = in_inference(call, plain)};
    out.push_back({.subject = std::move(subject), .most_added = most});
  };
  add("inference_mm", 0.5, [](const Tensors& t) { (void)at::mm(t.a, t.right); });
  add("inference_view", 0.5, [](const Tensors& t) { (void)t.a.view({t.a.size(0), 2, 4}); });
  out.back().subject.peer = false;  // PyTorch's DTensor throws there
  add("inference_layer_norm", 1, [](const Tensors& t) { (void)at::layer_norm(t.a, {8}, t.bias, t.bias); });
  add("inference_add_of_fresh_plain", 0, [](const Tensors& t) {
    const ImplicitReplication guard;
    (void)at::add(t.x, at::empty({8, 8}, at::TensorOptions().device(t.x.device())));
  });
  return out;
}

// Returns cases for the cost of redistributions without communication, since this world moves nothing.
std::vector<Case> moves(const Tensors& ours, const Tensors& plain, const DeviceMesh& mesh) {
  std::vector<Case> out;
  const auto add = [&](const char* name, double most, std::function<void()> body) {
    out.push_back(
        {.subject = {.name = name, .ours = without_grad(std::move(body)), .peer_plain = false}, .most_added = most});
  };
  const at::Tensor partial = from_local(plain.right, mesh, {Partial()});
  const auto move = [&](const char* name, const at::Tensor& from, const Placement& to) {
    add(name, 3, [=] { (void)redistribute(from, {to}); });
  };
  add("from_local", 0.5, [local = plain.a, mesh] { (void)from_local(local, mesh, {Shard(0)}); });
  move("S(0)_to_itself", ours.a, Shard(0));
  move("R_to_S(0)", ours.right, Shard(0));
  move("S(0)_to_R", ours.a, Replicate());
  move("S(0)_to_S(1)", ours.a, Shard(1));
  move("P_to_S(0)", partial, Shard(0));
  move("P_to_R", partial, Replicate());
  return out;
}

void mlp_step(const Tensors& t) {
  at::Tensor y = at::mm(at::gelu(at::mm(t.x, t.w1.t())), t.w2.t());
  if (is_dtensor(y)) y = redistribute(y, {Replicate()});
  y.sum().backward();
  t.w1.mutable_grad().reset();
  t.w2.mutable_grad().reset();
}

// Runs forward and backward of five operators, none of which communicates or takes long itself.
void five_operators(const Tensors& t) {
  at::tanh(at::add(at::mul(at::relu(at::mm(t.a, t.right)), t.b), t.a)).backward(t.b);
  t.a.mutable_grad().reset();
}

std::vector<Case> graphs(Tensors ours, Tensors plain) {
  for (Tensors* const t : {&ours, &plain}) {
    for (at::Tensor* const leaf : {&t->a, &t->w1, &t->w2}) *leaf = leaf->detach().requires_grad_();
  }
  return {{.subject = {.name = "five_operators_and_back",
                       .ours = [=] { five_operators(ours); },
                       .plain = [=] { five_operators(plain); }},
           .most_added = 4},
          {.subject = {.name = "mlp", .ours = [=] { mlp_step(ours); }, .plain = [=] { mlp_step(plain); }}}};
}

std::shared_ptr<torch::optim::AdamW> adamw(const DeviceMesh* mesh, c10::Device device) {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 100; ++i) {
    const auto made = [&] {
      const at::Tensor piece = at::randn({256, 256}).to(device);
      return mesh == nullptr ? piece : from_local(piece, *mesh, {Shard(0)});
    };
    parameters.push_back(made().requires_grad_());
    parameters.back().mutable_grad() = made();
  }
  return std::make_shared<torch::optim::AdamW>(parameters);
}

// Returns the case of the recorder alone, which every other case contains, beside an empty loop.
Case records(const DeviceMesh& mesh) {
  // The compiler must take each turn to read and write memory, so that it keeps the empty loop.
  const auto turns = [](const auto& body) {
    for (int i = 0; i < 100; ++i) {
      body();
      asm volatile("" ::: "memory");
    }
  };
  return {.subject = {.name = "100_records",
                      .ours = [=] { turns([&] { const Recorder::Span span(mesh.world().recorder(), "aten::mm"); }); },
                      .plain = [=] { turns([] {}); },
                      .peer = false},
          .most_added = 10};
}

Case optimizer_step(const DeviceMesh& mesh) {
  return {.subject = {.name = "adamw_step_of_100",
                      .ours = [made = adamw(&mesh, mesh.device())] { made->step(); },
                      .plain = [made = adamw(nullptr, mesh.device())] { made->step(); },
                      .fewer = 200},
          .most_times = 1.10};
}

// Returns the case of a first mm, for which no decision is cached.
Case first_call(const DeviceMesh& mesh, double most_added) {
  const std::size_t dims = static_cast<std::size_t>(mesh.ndim());
  const at::Tensor left = distribute_tensor(at::randn({64, 64}), mesh, Placements(dims, Shard(0)), kNoSource);
  const at::Tensor right = distribute_tensor(at::randn({64, 64}), mesh, Placements(dims, Replicate()), kNoSource);
  return {.subject = {.name = "first_mm_" + std::to_string(dims) + "d",
                      .ours = without_grad([=] {
                        clear_dispatch_cache();
                        (void)at::mm(left, right);
                      }),
                      .plain = without_grad([a = to_local(left), b = to_local(right)] {
                        clear_dispatch_cache();  // called here too, so that its time cancels
                        (void)at::mm(a, b);
                      }),
                      .fewer = 100},
          .most_added = most_added};
}

}  // namespace

std::vector<Case> dispatch_cases(const DeviceMesh& mesh) {
  const Tensors ours = on_mesh(mesh);
  const Tensors plain = pieces_of(ours);
  std::vector<Case> out = operators(ours, plain);
  for (Case& each : serving(ours, plain)) out.push_back(std::move(each));
  for (Case& each : moves(ours, plain, mesh)) out.push_back(std::move(each));
  for (Case& each : graphs(ours, plain)) out.push_back(std::move(each));
  out.push_back(records(mesh));
  out.push_back(optimizer_step(mesh));
  const std::shared_ptr<World> world = mesh.world().shared_from_this();
  out.push_back(first_call(DeviceMesh(world, mesh.device_type(), Mesh({8}, {"a"})), 50));
  out.push_back(first_call(DeviceMesh(world, mesh.device_type(), Mesh({2, 4}, {"a", "b"})), 100));
  out.push_back(first_call(DeviceMesh(world, mesh.device_type(), Mesh({2, 2, 2}, {"a", "b", "c"})), 200));
  return out;
}

}  // namespace tessera::bench

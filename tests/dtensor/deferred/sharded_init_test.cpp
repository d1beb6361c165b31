// Tests modules built under ShardedInit: each rank's pieces equal those of the same module built whole, bit by bit, and
// peak memory stays low.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/deferred/sharded_init.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/init.h"
#include "tessera/dtensor/random.h"
#include "tessera/layers/init_type.h"
#include "tessera/mesh/collectives/checked.h"
#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/clone.h"
#include "tessera/styles/distribute_module.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/dtensor/deferred/peak_memory.h"
#include "tessera/tests/dtensor/values.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using torch::nn::Module;

struct InitializedImpl : Module {
  InitializedImpl() {
    for (const InitType type : {InitType::kOrthogonal, InitType::kDirac, InitType::kTruncNormal}) {
      initialize_(register_parameter(std::string(to_string(type)), torch::empty({6, 5, 3})), type);
    }
  }
};

// Initializes as users' modules do: in the constructor, by operators, with computed buffers and with writes to views.
struct OwnImpl : Module {
  OwnImpl() {
    scaled = register_parameter("scaled", torch::randn({10, 6}) * 0.02);
    unit = register_parameter("unit", torch::eye(7, 5));
    rows = register_parameter("rows", torch::zeros({9, 4}));
    {
      const torch::NoGradGuard no_grad;
      rows[3].fill_(2);
      rows.slice(1, 1, 3).normal_(0, 0.5);
    }
    const at::Tensor place = torch::arange(7, torch::kFloat).unsqueeze(1), rate = torch::tensor({{0.5F, 0.25F}});
    at::Tensor encoding = torch::zeros({7, 4});
    encoding.slice(1, 0, 4, 2).copy_(torch::sin(place * rate));
    encoding.slice(1, 1, 4, 2).copy_(torch::cos(place * rate));
    this->encoding = register_buffer("encoding", encoding);
    order = register_buffer("order", torch::randperm(5));
    orthogonal = register_parameter("orthogonal", torch::empty({8, 12}));
    tessera::orthogonal_(orthogonal, 1.5);
    sparse = register_parameter("sparse", torch::empty({10, 6}));
    tessera::sparse_(sparse, 0.3);
    linear = register_module("linear", torch::nn::Linear(3, 5));
    torch::nn::init::constant_(linear->bias, 0.25);
    linear->to(torch::kDouble);
  }
  at::Tensor scaled, unit, rows, encoding, order, orthogonal, sparse;
  torch::nn::Linear linear{nullptr};
};

using Make = std::function<std::shared_ptr<Module>()>;
struct Row {
  std::string why;
  Make make;
};

const std::vector<Row>& rows() {
  namespace nn = torch::nn;
  static const std::vector<Row> all = {
      {"Linear", [] { return nn::Linear(7, 10).ptr(); }},
      {"Linear without bias", [] { return nn::Linear(nn::LinearOptions(3, 3).bias(false)).ptr(); }},
      {"Bilinear", [] { return nn::Bilinear(3, 4, 5).ptr(); }},
      {"Embedding, one row zero", [] { return nn::Embedding(nn::EmbeddingOptions(11, 6).padding_idx(4)).ptr(); }},
      {"LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({5})).ptr(); }},
      {"BatchNorm", [] { return nn::BatchNorm2d(6).ptr(); }},
      {"GroupNorm", [] { return nn::GroupNorm(2, 6).ptr(); }},
      {"Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(4, 6, 3).groups(2)).ptr(); }},
      {"ConvTranspose1d", [] { return nn::ConvTranspose1d(nn::ConvTranspose1dOptions(4, 6, 3)).ptr(); }},
      {"LSTM", [] { return nn::LSTM(nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true)).ptr(); }},
      {"GRUCell", [] { return nn::GRUCell(4, 5).ptr(); }},
      {"PReLU", [] { return nn::PReLU(nn::PReLUOptions().num_parameters(5)).ptr(); }},
      {"MultiheadAttention", [] { return nn::MultiheadAttention(8, 2).ptr(); }},
      {"TransformerEncoder",
       [] {
         return nn::TransformerEncoder(nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(8, 2), 2))
             .ptr();
       }},
      {"a module of one's own", [] { return std::make_shared<OwnImpl>(); }},
      {"initialize_ by an InitType", [] { return std::make_shared<InitializedImpl>(); }},
  };
  return all;
}

// Runs `make` under the guard on this rank of `mesh`, after the same seed each time, and distributes every
// floating-point tensor as `cut`; it is replicated where it does not have the sharded dimension.
std::shared_ptr<Module> build(const Make& make, const DeviceMesh& mesh, const Placements& cut) {
  manual_seed(5, mesh.world());
  const ShardedInit init(mesh);
  std::shared_ptr<Module> module = make();
  const auto place = [&](const std::string&, Module& m, const DeviceMesh& on) {
    const auto each = [&](const at::Tensor& t) {
      Placements placements = t.is_floating_point() ? cut : Placements(cut.size(), Replicate());
      for (Placement& p : placements) {
        if (p.is_shard() && p.tensor_dim() >= t.dim()) p = Replicate();
      }
      distribute_in_place(t, on, placements);
    };
    for (const at::Tensor& t : m.parameters(false)) each(t);
    for (const at::Tensor& t : m.buffers(false)) each(t);
  };
  distribute_module(*module, mesh, place);
  return module;
}

void check_same_bits(const Module& got, const Module& whole, const DeviceMesh& mesh) {
  const auto check = [&](const auto& items, const auto& wanted) {
    REQUIRE(items.size() == wanted.size());
    for (const auto& item : items) {
      CAPTURE(item.key());
      const at::Tensor want = to_local(wanted[item.key()].detach());
      CHECK(item.value().sizes() == want.sizes());
      CHECK(item.value().device() == c10::Device(c10::kCPU));
      CHECK(item.value().requires_grad() == wanted[item.key()].requires_grad());
      CHECK(same(to_local(item.value().detach()), piece_of(want, mesh, placements_of(item.value()))));
    }
  };
  check(got.named_parameters(), whole.named_parameters());
  check(got.named_buffers(), whole.named_buffers());
}

}  // namespace

TEST_CASE("modules built straight into shards have, bit by bit, the pieces of the module that is built whole") {
  for (const Row& row : rows()) {
    CAPTURE(row.why);
    const auto whole = build(row.make, fake_mesh(0, {1}), {Replicate()});
    for (const int64_t size : {1, 2, 3, 4}) {
      for (int64_t rank = 0; rank < size; ++rank) {
        const DeviceMesh mesh = fake_mesh(rank, {size});
        for (const Placement& cut : {Shard(0), Shard(1), Replicate()}) {
          CAPTURE(fmt::format("rank {} of {}, {}", rank, size, to_string(cut)));
          const CommCounter counter(mesh);
          check_same_bits(*build(row.make, mesh, {cut}), *whole, mesh);
          CHECK(counter.total() == 0);
        }
      }
    }
    for (int64_t rank = 0; rank < 4; ++rank) {
      const DeviceMesh mesh = fake_mesh(rank, {2, 2}, {"dp", "tp"});
      check_same_bits(*build(row.make, mesh, {Shard(0), Shard(1)}), *whole, mesh);
      check_same_bits(*build(row.make, mesh, {Shard(0).ordered(1), Shard(0)}), *whole, mesh);
    }
  }
}

namespace {

// Has parameters that are views of tensors of another shape.
struct ViewsImpl : Module {
  ViewsImpl() {
    transposed = register_parameter("transposed", torch::rand({6, 10}).t());
    const at::Tensor fused = torch::empty({12, 5});
    torch::nn::init::xavier_uniform_(fused);
    part = register_parameter("part", fused.slice(0, 2, 9));
    flat = register_parameter("flat", torch::randn({4, 6}).flatten());
  }
  at::Tensor transposed, part, flat;
};

}  // namespace

TEST_CASE("parameters that view tensors of another shape are made in pieces too, then redistributed") {
  const Make make = [] { return std::make_shared<ViewsImpl>(); };
  const auto whole = build(make, fake_mesh(0, {1}), {Replicate()});
  for (const int64_t size : {1, 2, 3, 4}) {
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {size}, {}, world);
      for (const Placement& cut : {Shard(0), Shard(1)}) check_same_bits(*build(make, mesh, {cut}), *whole, mesh);
    });
  }
}

TEST_CASE("the numbers are those of the same functions on DTensors") {
  const DeviceMesh mesh = fake_mesh(1, {3});
  const auto built = build([] { return torch::nn::Linear(7, 10).ptr(); }, mesh, {Shard(0)});
  manual_seed(5, mesh.world());
  const at::Tensor weight = empty({10, 7}, mesh, {Replicate()}), bias = empty({10}, mesh, {Replicate()});
  torch::nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
  torch::nn::init::uniform_(bias, -1 / std::sqrt(7.0), 1 / std::sqrt(7.0));
  CHECK(same(to_local(built->parameters()[0].detach()), piece_of(to_local(weight), mesh, {Shard(0)})));
  CHECK(same(to_local(built->parameters()[1].detach()), piece_of(to_local(bias), mesh, {Shard(0)})));
}

TEST_CASE("torch::normal draws each element by its place, as randn does") {
  const auto make = [] {
    auto module = std::make_shared<Module>();
    module->register_parameter("weight", torch::normal(1.0, 0.5, {7, 3}));
    return module;
  };
  const auto of = [&](const DeviceMesh& mesh, const Placement& placement) {
    return to_local(build(make, mesh, {placement})->parameters()[0].detach());
  };
  const at::Tensor whole = of(fake_mesh(0, {1}), Replicate());
  CHECK((whole - 1).abs().max().item<double>() < 2.5);
  CHECK(whole.std().item<double>() > 0.25);
  for (const Placement& cut : {Shard(0), Shard(1), Replicate()}) {
    const DeviceMesh mesh = fake_mesh(1, {3});
    CHECK(same(of(mesh, cut), piece_of(whole, mesh, {cut})));
  }
}

namespace {

struct MlpImpl : Module {
  explicit MlpImpl(int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Mlp);

const ParallelPlan kMlp = {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};

}  // namespace

TEST_CASE("parallelize_module, under the guard or after it, places as the plan says; tied and shared tensors stay so") {
  for (const bool after : {false, true}) {
    CAPTURE(after);
    const DeviceMesh mesh = fake_mesh(1, {2}, {"tp"});
    manual_seed(5, mesh.world());
    Mlp module{nullptr};
    const auto parallelize = [&] { parallelize_module(module, mesh, kMlp); };
    {
      const ShardedInit init(mesh);
      module = Mlp(4);
      module->register_parameter("tied", module->up->weight);
      module->register_buffer("alias", module->down->bias.detach());
      if (!after) parallelize();
    }
    if (after) parallelize();
    CHECK(placements_of(module->up->weight) == Placements{Shard(0)});
    CHECK(placements_of(module->down->weight) == Placements{Shard(1)});
    CHECK(placements_of(module->down->bias) == Placements{Replicate()});
    CHECK(module->named_parameters()["tied"].is_same(module->up->weight));
    CHECK(to_local(module->named_buffers()["alias"]).is_alias_of(to_local(module->down->bias.detach())));
  }
}

TEST_CASE("peak memory: this rank's pieces and little more, and nothing while the constructors run") {
  constexpr int64_t kWidth = 256;
  constexpr int64_t kBytes = 8 * kWidth * kWidth * 4;  // the size of the two whole weights
  const DeviceMesh mesh = fake_mesh(1, {4}, {"tp"});
  const ShardedInit init(mesh);
  Mlp module{nullptr};
  const int64_t constructing = peak_bytes([&] { module = Mlp(kWidth); });
  const int64_t peak = peak_bytes([&] { parallelize_module(module, mesh, kMlp); });
  MESSAGE("whole ", kBytes, " bytes; a rank of four: ", constructing, " while constructing, ", peak, " in all");
  CHECK(constructing == 0);
  CHECK(peak >= kBytes / 4);
  CHECK(peak <= kBytes / 4 + kBytes / 64);
}

namespace {

// Returns the message of what `body` throws.
template <class Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

void check_has(const std::string& message, const std::string& part) {
  CAPTURE(message);
  CAPTURE(part);
  CHECK(message.find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("a module that holds the model of its layers beside its children is cloned after the guard and under it") {
  namespace nn = torch::nn;
  const auto make = [] {
    const nn::TransformerEncoderLayerOptions layer = nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(8);
    return nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2));
  };
  const DeviceMesh mesh = fake_mesh(0, {2});
  std::optional<ShardedInit> init(std::in_place, mesh);
  nn::TransformerEncoder module = make();
  parallelize_module(module, mesh, {});
  const auto under_it = std::dynamic_pointer_cast<nn::TransformerEncoderImpl>(clone_module(*module));
  init.reset();
  const auto after_it = std::dynamic_pointer_cast<nn::TransformerEncoderImpl>(module->clone());
  const at::Tensor x = from_local(at::ones({3, 2, 8}), mesh, {Replicate()});
  module->eval();
  const at::Tensor want = to_local(module->forward(x));
  for (const auto& copy : {under_it, after_it}) {
    copy->eval();
    CHECK(same(to_local(copy->forward(x)), want));
    const char* const name = "layers.1.linear1.weight";
    const at::Tensor own = to_local(copy->named_parameters()[name]);
    CHECK_FALSE(own.is_alias_of(to_local(module->named_parameters()[name])));
  }
  // The model itself never gets values.
  const auto layer = after_it->options.encoder_layer().ptr();
  check_has(refusal([&] { layer->parameters()[0].sum(); }), "has no values yet");
}

TEST_CASE("under the guard, modules and DTensors with values take others as they do without it") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  torch::nn::Linear plain(4, 4), styled(4, 4);
  parallelize_module(styled, mesh, {{"", ColwiseParallel()}});
  const at::Tensor& weight = styled->weight;
  const at::Tensor other = from_local(at::ones({2, 4}), mesh, {Shard(0)}),
                   fits_not = from_local(at::ones({4, 2}), mesh, {Shard(1)});
  const ShardedInit init(mesh);
  plain->to(torch::kDouble);
  CHECK(plain->weight.dtype() == torch::kDouble);
  check_has(refusal([&] { weight.set_data(fits_not); }), "redistribute them to the parameter's layout");
  weight.set_data(other);
  CHECK(to_local(weight).data_ptr() == to_local(other).data_ptr());
  check_has(refusal([&] { weight.set_data(fits_not); }), "redistribute them to the parameter's layout");  // as before
}

TEST_CASE("an operator that is run for its sizes draws nothing from LibTorch's generator") {
  torch::manual_seed(3);
  const at::Tensor want = torch::rand({4});
  torch::manual_seed(3);
  {
    const ShardedInit init(fake_mesh(0, {2}));
    torch::randperm(100);
  }
  CHECK(torch::rand({4}).equal(want));
}

TEST_CASE("refused: reading values, operators outside the guard, a whole temporary, communication") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  at::Tensor left;
  {
    const ShardedInit init(mesh);
    left = torch::ones({4, 4});
    check_has(refusal([&] { left.sum().item(); }), "has no values yet");
    check_has(refusal([&] { left.data_ptr<float>(); }), "has no memory yet");
    check_has(refusal([&] { torch::tensor(std::vector<float>{1, 2}); }), "make it before the guard");

    const at::Tensor qr = torch::empty({8, 8});
    torch::nn::init::orthogonal_(qr);
    check_has(refusal([&] { distribute_in_place(qr, mesh, {Shard(0)}); }), "tessera::orthogonal_");
    const at::Tensor normed = torch::randn({8, 8});
    normed.div_(normed.norm());
    check_has(refusal([&] { distribute_in_place(normed, mesh, {Shard(0)}); }), "would communicate");
    const at::Tensor computed = torch::linspace(0, 1, 8) + 1;
    check_has(refusal([&] { distribute_in_place(computed, mesh, {Shard(0)}); }),
              "every rank would hold a whole tensor [8]");

    const at::Tensor random = torch::empty({2}, torch::kMeta), copied = torch::empty({2});
    CHECK(tessera::detail::is_deferred(random));  // as options of a tensor without values name that device too
    at::Tensor plain;
    {
      const tessera::detail::NotDeferred outside;
      plain = torch::ones({2});
      copied.dtype();
    }
    copied.copy_(plain);
    plain.add_(1);
    check_has(refusal([&] { distribute_in_place(copied, mesh, {Shard(0)}); }), "has been written since");

    const caffe2::TypeMeta before = c10::get_default_dtype();
    c10::set_default_dtype(caffe2::TypeMeta::Make<c10::BFloat16>());
    const at::Tensor quarters = torch::arange(0, 4) / 4;
    c10::set_default_dtype(before);
    check_has(refusal([&] { distribute_in_place(quarters, mesh, {Replicate()}); }),
              "the constructor has made BFloat16 and the same call makes Float now");
  }
  {
    const ShardedInit second(mesh);
    const at::Tensor other = torch::zeros({4, 4});
    check_has(refusal([&] { other.copy_(left); }), "made under two ShardedInit guards");
  }
  check_has(refusal([&] { left.add(1); }), "go on under the guard");
  check_has(refusal([&] { left.mul_(2); }), "parallelize_module first");
  distribute_in_place(left, mesh, {Shard(0)});
  CHECK(same(to_local(left), at::ones({2, 4})));
}

TEST_CASE("computed buffers whose operators LibTorch cannot run without values: the sizes are found on zeros") {
  using Make = std::function<at::Tensor()>;
  const auto angles = [] { return torch::outer(torch::arange(5), torch::arange(3)).to(torch::kFloat); };
  const std::vector<std::pair<std::string, Make>> buffers = {
      {"polar",
       [&] {
         return torch::polar(torch::ones({5, 3}), angles());
       }},
      {"complex", [&] { return torch::complex(angles(), angles() * 2); }},
      {"where", [] { return torch::where(torch::arange(6) > 2, torch::arange(6), torch::zeros({6}, torch::kLong)); }},
      {"roll", [&] { return torch::roll(angles(), 1, 0); }},
      {"flip", [&] { return angles().flip(0); }},
      {"vander", [] { return torch::vander(torch::arange(4).to(torch::kFloat)); }},
      {"nan_to_num", [&] { return torch::nan_to_num(angles() / 0.0); }},
      {"fft_rfft", [&] { return torch::fft_rfft(angles()); }},
      {"searchsorted", [] { return torch::searchsorted(torch::arange(5), torch::arange(3)); }},
      {"bucketize", [] { return torch::bucketize(torch::arange(5), torch::arange(3)); }},
      {"histc", [&] { return torch::histc(angles(), 4, 0, 8); }},
      {"max", [&] { return angles() / angles().max(); }},
      {"floor_divide", [] { return torch::floor_divide(torch::arange(6), torch::full({6}, 2, torch::kLong)); }},
      {"written to", [&] {
         at::Tensor out = torch::ones({2, 3});
         torch::roll_out(out, torch::arange(6).to(torch::kFloat).view({2, 3}), 1, 1);
         return out * 2;
       }}};
  for (const auto& each : buffers) {
    CAPTURE(each.first);
    const Make& make = each.second;
    const at::Tensor want = make();
    for (const int64_t rank : {0, 1}) {
      const DeviceMesh mesh = fake_mesh(rank, {2});
      std::optional<ShardedInit> init(std::in_place, mesh);
      const at::Tensor made = make();
      CHECK(made.sizes() == want.sizes());
      init.reset();
      distribute_in_place(made, mesh, {Replicate()});
      CHECK(at::allclose(to_local(made), want, 1e-6, 1e-6));
    }
  }
  const at::Tensor table = torch::ones({4});
  const ShardedInit init(fake_mesh(0, {2}));
  const at::Tensor ids = torch::arange(4);
  check_has(refusal([&] { table.copy_(ids); }), "a tensor with values would be written from one that has none");
  check_has(refusal([&] { table.index_put_({ids}, torch::ones({4})); }), "a tensor with values would be written");
  for (const Make& make :
       {Make([&] { return torch::nonzero(ids); }), Make([&] { return torch::bincount(ids); }),
        Make([&] { return ids.index({ids > 1}); }), Make([&] { return torch::one_hot(ids); }),
        Make([&] { return torch::where(ids > 1)[0]; }), Make([&] { return ids.repeat_interleave(ids); }),
        Make([&] { return ids.narrow(0, ids.select(0, 1), 2); })}) {
    const std::string text = refusal([&] { make(); });
    check_has(text, "ShardedInit");
    CHECK(text.find("PT2") == std::string::npos);
  }
  {
    const tessera::detail::NotDeferred outside;
    CHECK(table.equal(torch::ones({4})));
  }
}

TEST_CASE("constructors that mix tensors with values and without, or take options of others") {
  using torch::indexing::Slice;
  const at::Tensor table = at::arange(16, at::kFloat).reshape({4, 4}), rates = at::arange(4, at::kFloat);
  struct Pair {
    std::string name;
    std::function<at::Tensor(const at::Tensor& w)> make;
  };
  const std::vector<Pair> made = {
      {"to(other)", [&](const at::Tensor& w) { return table.to(w); }},
      {"type_as", [&](const at::Tensor& w) { return table.to(at::kDouble).type_as(w); }},
      {"options", [](const at::Tensor& w) { return torch::arange(4, w.options()) + 1; }},
      {"index_put_ of a number",
       [](const at::Tensor&) {
         at::Tensor mask = torch::zeros({4, 4});
         mask.index_put_({Slice(), Slice(0, 2)}, 1.0);
         return mask;
       }},
      {"outer", [&](const at::Tensor&) { return torch::outer(torch::arange(3, torch::kFloat), rates); }},
      {"product",
       [&](const at::Tensor&) {
         return torch::ones({4, 4}) * table;
       }},
      {"rows", [&](const at::Tensor&) { return table.index({torch::arange(2)}); }},
      {"another shape in place",
       [](const at::Tensor& w) {
         w.detach().t_().select(0, 0).fill_(7);
         return w.detach().clone();
       }},
      {"channels-last", [](const at::Tensor&) {
         at::Tensor t = torch::empty({2, 3, 2, 2}, at::TensorOptions(), at::MemoryFormat::ChannelsLast).fill_(1);
         t.permute({0, 2, 3, 1}).flatten().slice(0, 0, 5).zero_();
         return t;
       }}};
  for (const Pair& each : made) {
    CAPTURE(each.name);
    const at::Tensor want = each.make(torch::ones({4, 4}));
    for (const int64_t rank : {0, 1}) {
      const DeviceMesh mesh = fake_mesh(rank, {2});
      std::optional<ShardedInit> init(std::in_place, mesh);
      const at::Tensor got = each.make(torch::ones({4, 4}));
      init.reset();
      distribute_in_place(got, mesh, {Replicate()});
      CHECK(same(to_local(got), want));
    }
  }
  std::optional<ShardedInit> init(std::in_place, fake_mesh(0, {2}));
  check_has(refusal([] { torch::sparse_coo_tensor({4, 4}, torch::kFloat); }), "it makes a sparse tensor");
  check_has(refusal([] { torch::eye(3).to_sparse(); }), "it makes a sparse tensor");
}

TEST_CASE("under the guard the library's own tensors are real: layouts, gradients, pieces, collectives") {
  const at::Tensor values = at::arange(30, at::kDouble).view({5, 6}) + 1, factor = at::rand({5, 6}, at::kDouble);
  for (const int64_t size : {1, 2, 3}) {
    CAPTURE(size);
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {size}, {}, world);
      const at::Tensor mine = piece_of(values, mesh, {Shard(0)}).contiguous();
      const at::Tensor weight = distribute_tensor(values, mesh, {Shard(1)}, kNoSource).set_requires_grad(true);
      const at::Tensor by = distribute_tensor(factor, mesh, {Replicate()}, kNoSource);
      const ShardedInit init(mesh);
      const at::Tensor x = from_local(mine, mesh, {Shard(0)}, {.shape = values.sizes().vec(), .check = true});
      for (const Placement& to : {Placement(Replicate()), Placement(Shard(1)), Placement(Partial())}) {
        CAPTURE(to_string(to));
        CHECK(same(full_tensor(redistribute(x, {to})), values));
      }
      const at::Tensor moved = redistribute(x, {Shard(1)}, {.async = true});
      CHECK(same(to_local(moved), piece_of(values, mesh, {Shard(1)})));
      // The second result's gradient is undefined, and LibTorch fills it with zeros of its own.
      std::get<0>(redistribute(weight, {Shard(0)}).mul(by).sort(0)).sum().backward();
      CHECK(placements_of(weight.grad()) == placements_of(weight));
      CHECK(same(full_tensor(weight.grad()), factor));
      weight.select(1, 2).pow(2).sum().backward();
      at::Tensor want = factor.clone();
      want.select(1, 2).add_(2 * values.select(1, 2));
      CHECK(same(full_tensor(weight.grad()), want));
      CHECK(same(all_gather(mine.sum().view({1}), mesh, 0).sum(), values.sum()));
      CHECK(same(all_reduce(mine.sum(), mesh, 0, ReduceOp::kSum), values.sum()));
      CHECK(broadcast(values, mesh, 0, 0).equal(values));
    });
  }
}

TEST_CASE(
    "a tensor without values is refused where its values are needed, by a message that says whether the guard is "
    "alive") {
  const DeviceMesh mesh = fake_mesh(0, {2});
  const at::Tensor dtensor = ones({2, 4}, mesh, {Shard(0)});
  std::optional<ShardedInit> init(std::in_place, mesh);
  const at::Tensor left = torch::ones({2, 4});
  const auto each = [&](const std::string& way_out) {
    const std::vector<std::function<void()>> uses = {[&] { from_local(left, mesh, {Shard(0)}); },
                                                     [&] { distribute_tensor(left, mesh, {Shard(0)}, kNoSource); },
                                                     [&] { redistribute(left, {Shard(0)}); },
                                                     [&] { full_tensor(left); },
                                                     [&] { all_reduce(left, mesh, 0, ReduceOp::kSum); },
                                                     [&] { dtensor + left; },
                                                     [&] {
                                                       const ImplicitReplication plain_counts;
                                                       torch::matmul(dtensor, left.t());
                                                     }};
    for (std::size_t i = 0; i < uses.size(); ++i) {
      CAPTURE(i);
      const std::string message = refusal(uses[i]);
      check_has(message, "[2, 4]");
      check_has(message, "made under ShardedInit");
      check_has(message, way_out);
    }
  };
  each("the guard is still alive on this thread: end its scope");
  check_has(refusal([&] { left.sum().item(); }), "end its scope");
  init.reset();
  each("parallelize_module first");
}

TEST_CASE("a failure while values are made keeps its kind, and every message names the parameter") {
  const at::Tensor values = at::arange(12, at::kFloat).view({6, 2});
  struct FromValues : Module {
    explicit FromValues(const at::Tensor& values) {
      const torch::NoGradGuard no_grad;
      register_parameter("weight", torch::empty({6, 2})).copy_(values);
    }
  };
  run_in_process(2, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, world);
    const at::Tensor mine = values + world->rank();
    std::optional<ShardedInit> init(std::in_place, mesh);
    FromValues module(mine);
    init.reset();
    const Checked compared(*world);
    std::string message;
    try {
      parallelize_module(module, mesh, {});
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    check_has(message, "for weight [6, 2] as [R]");
    check_has(message, "is not the same on every rank");
    CHECK(message.find("leave it Replicate") == std::string::npos);
  });
  const DeviceMesh mesh = fake_mesh(0, {2});
  std::optional<ShardedInit> init(std::in_place, mesh);
  torch::nn::Linear linear(8, 8);
  torch::nn::init::orthogonal_(linear->weight);
  init.reset();
  const auto parallelize = [&] { parallelize_module(linear, mesh, ColwiseParallel()); };
  CHECK_THROWS_AS(parallelize(), std::invalid_argument);
  check_has(refusal(parallelize), "for weight [8, 8] as [S(0)]");
}

// Tests gradients in buckets where parameters are frozen and trained again, where ranks have terms of which others have
// none, and where a rank fails; and what bucket_gradients refuses.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/gelu.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn.h>

#include <doctest/doctest.h>

#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/gradient_buckets.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/in_process.h"
#include "tessera/styles/parallelize.h"
#include "tessera/tests/harness/device.h"
#include "tessera/tests/styles/blocks.h"
#include "tessera/tests/styles/fake_mesh.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr int64_t kLarge = int64_t{25} << 20;

// Torch's generator belongs to the process: the values are made before the ranks start.
struct Cases {
  Mlp mlp{10, 16, 12};
  at::Tensor rows = numbers({2, 10});  // of each data rank
  Cases() { fill(*mlp); }
};
const Cases& cases() {
  static const Cases all;
  return all;
}

Mlp mlp() {
  const torch::NoGradGuard no_grad;
  Mlp fresh(10, 16, 12);
  fresh->to(device(), at::kDouble);
  const auto from = cases().mlp->named_parameters();
  for (auto& item : fresh->named_parameters()) item.value().copy_(from[item.key()]);
  return fresh;
}

// Says which data ranks use `up` alone in a backward.
using Skips = std::function<bool(int64_t rank)>;
bool nobody(int64_t /*rank*/) { return false; }

// Has a module that data ranks share, each with its own rows, and the same module in one process with the rows of all.
struct Job {
  explicit Job(DeviceMesh of_ranks) : mesh(std::move(of_ranks)) {}

  static at::Tensor loss(Mlp& m, const at::Tensor& x, bool skips) {
    at::Tensor y = m->up(x);
    if (!skips) y = m->down(at::gelu(y));
    return y.square().sum();
  }
  at::Tensor own_loss(const Skips& skips = nobody) {
    const at::Tensor x = from_local(cases().rows, mesh, {Shard(0), Replicate()});
    return loss(module, x, skips(mesh.local_rank("dp")));
  }
  void backward(const Skips& skips = nobody) {
    own_loss(skips).backward();
    for (int64_t rank = 0; rank < mesh.size("dp"); ++rank) loss(reference, cases().rows, skips(rank)).backward();
  }
  void zero_grad() {
    module->zero_grad();
    reference->zero_grad();
  }
  void train(bool up, bool down) {
    for (Mlp* const each : {&module, &reference}) {
      for (const at::Tensor& p : (*each)->up->parameters()) p.set_requires_grad(up);
      for (const at::Tensor& p : (*each)->down->parameters()) p.set_requires_grad(down);
    }
  }
  void check_gradients() {
    const auto wanted = reference->named_parameters();
    for (const auto& item : module->named_parameters()) {
      CAPTURE(item.key());
      const at::Tensor got = item.value().grad(), want = wanted[item.key()].grad();
      REQUIRE(got.defined() == want.defined());
      if (!got.defined()) continue;
      CHECK(placements_of(got) == placements_of(item.value()));
      CHECK(difference(got, want) <= 1e-11);
    }
  }

  DeviceMesh mesh;
  Mlp module = mlp(), reference = mlp();
};

void on_data_ranks(const std::vector<int64_t>& sizes, const std::function<void(const DeviceMesh&)>& body) {
  (void)cases();
  for (const int64_t size : sizes) {
    CAPTURE(size);
    run_in_process(size, [&](const std::shared_ptr<World>& world) {
      body(init_device_mesh(device_name(), {size, 1}, {"dp", "tp"}, world));
    });
  }
}

ParallelizeOptions buckets_of(int64_t bytes) { return {.gradient_buckets = {.bucket_bytes = bytes}}; }

// Says what was communicated for gradients.
struct Sent {
  int64_t bytes = 0;      // of the all-reduces
  int64_t exchanges = 0;  // of the order in which gradients come
};
Sent sent(const CommCounter& counter) {
  Sent out;
  for (const CollectiveRecord& each : counter.records()) {
    if (each.op != "gradient") continue;
    if (std::string(each.kind) == "all_reduce") out.bytes += each.bytes;
    out.exchanges += std::string(each.kind) == "all_gather";
  }
  return out;
}

// These are the bytes of the gradients of `up`, and of both layers, with a flag for each parameter.
constexpr int64_t kUpBytes = 8 * (16 * 10 + 16 + 2), kAllBytes = kUpBytes + 8 * (12 * 16 + 12 + 2);

std::string text_thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE(
    "a parameter that is trained from some step on is reduced as others are, also where a rank lacks a gradient") {
  for (const int64_t bytes : {kLarge, int64_t{1}}) {
    CAPTURE(bytes);
    for (const bool guarded : {false, true}) {
      CAPTURE(guarded);
      on_data_ranks({2, 3, 4}, [&](const DeviceMesh& mesh) {
        Job job(mesh);
        job.train(/*up=*/true, /*down=*/false);
        parallelize_module(job.module, mesh, {}, buckets_of(bytes));
        for (int64_t step = 0; step < 6; ++step) {
          CAPTURE(step);
          if (step == 2) job.train(/*up=*/true, /*down=*/true);
          job.zero_grad();
          const auto skips = [&](int64_t rank) { return step >= 2 && rank == step % mesh.size("dp"); };
          if (guarded) {
            const AccumulateGradients guard(mesh);
            job.backward(skips);
          }
          job.backward(skips);
          job.check_gradients();
        }
      });
    }
  }
}

TEST_CASE("gradients without pending terms in the first pass leave buckets as they are: a penalty on the weights") {
  const auto penalty = [](Mlp& m) {
    at::Tensor sum = at::zeros({}, at::TensorOptions(at::kDouble).device(device()));
    for (const at::Tensor& p : m->parameters()) sum = sum + p.square().sum();
    return sum;
  };
  on_data_ranks({2, 3}, [&](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    for (int64_t step = 0; step < 4; ++step) {
      CAPTURE(step);
      job.zero_grad();
      penalty(job.module).backward();
      penalty(job.reference).backward();
      const CommCounter counter(mesh);
      job.backward([&](int64_t rank) { return step > 0 && rank == 0; });
      CHECK(sent(counter).bytes == kAllBytes);
      job.check_gradients();
      // Both kinds of terms are kept, in either order, and sent once.
      job.zero_grad();
      for (const bool first : {true, false}) {
        const AccumulateGradients guard(mesh);
        const CommCounter none(mesh);
        if (first == (step % 2 == 0)) {
          job.backward([&](int64_t rank) { return rank == 0; });
        } else {
          penalty(job.module).backward();
          penalty(job.reference).backward();
        }
        CHECK(none.total() == 0);
      }
      job.backward();
      job.check_gradients();
    }
  });
}

TEST_CASE("a parameter with hooks of the user's own is in no bucket while it has them") {
  on_data_ranks({2, 3}, [](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    const auto step = [&](std::size_t bucket_bytes, bool doubles) {
      job.zero_grad();
      const CommCounter counter(mesh);
      job.backward();
      CAPTURE(counter.to_string());
      CHECK(counter.bytes("all_reduce") == static_cast<int64_t>(bucket_bytes));
      if (doubles) job.reference->up->weight.mutable_grad() *= 2;
      job.check_gradients();
    };
    step(kAllBytes, false);
    step(kAllBytes, false);
    const auto hook = job.module->up->weight.register_hook([](const at::Tensor& g) { return g * 2; });
    step(kAllBytes - 8, true);  // its gradient goes alone, and needs no flag
    step(kAllBytes - 8, true);
    job.module->up->weight.remove_hook(hook);
    step(kAllBytes, false);
  });
}

TEST_CASE(
    "nothing is sent for a parameter while it is frozen, and its place in the order is known when it comes back") {
  on_data_ranks({2, 4}, [](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    const auto step = [&](int64_t bytes, int64_t exchanges) {
      job.zero_grad();
      const CommCounter counter(mesh);
      job.backward();
      CAPTURE(counter.to_string());
      CHECK(sent(counter).bytes == bytes);
      CHECK(sent(counter).exchanges == exchanges);
      job.check_gradients();
    };
    step(kAllBytes, 0);
    step(kAllBytes, 1);
    job.train(/*up=*/true, /*down=*/false);
    step(kUpBytes, 0);
    step(kUpBytes, 0);
    job.train(/*up=*/true, /*down=*/true);
    step(kAllBytes, 0);
    // It may be frozen after its use: autograd drops its gradient.
    const at::Tensor want = job.reference->up->weight.grad().clone(), loss = job.own_loss();
    job.zero_grad();
    job.train(/*up=*/true, /*down=*/false);
    const CommCounter counter(mesh);
    loss.backward();
    CHECK(sent(counter).bytes == kUpBytes);
    CHECK(difference(job.module->up->weight.grad(), want) <= 1e-11);
    CHECK_FALSE(job.module->down->weight.grad().defined());
  });
}

TEST_CASE("parameters that are trained in turns, as those of two networks, have the gradients of one process") {
  for (const int64_t bytes : {kLarge, int64_t{1}, int64_t{0}}) {
    CAPTURE(bytes);
    on_data_ranks({2, 3}, [&](const DeviceMesh& mesh) {
      Job job(mesh);
      parallelize_module(job.module, mesh, {}, buckets_of(bytes));
      const CommCounter counter(mesh);
      for (int step = 0; step < 6; ++step) {
        CAPTURE(step);
        job.train(/*up=*/step % 2 == 0, /*down=*/step % 2 == 1);
        job.zero_grad();
        job.backward();
        job.check_gradients();
      }
      // Each half is new once.
      CHECK(sent(counter).exchanges == (bytes > 0 ? 2 : 0));
    });
  }
}

TEST_CASE("a parameter whose first gradient comes late is watched then, and ordered after that") {
  for (const int64_t bytes : {kLarge, int64_t{1}}) {
    CAPTURE(bytes);
    on_data_ranks({2, 3}, [&](const DeviceMesh& mesh) {
      Job job(mesh);
      parallelize_module(job.module, mesh, {}, buckets_of(bytes));
      // In step 3 one rank alone has gradients of `down`; step 4 is watched, and step 5 begins with an exchange.
      const std::vector<Skips> steps = {[](int64_t) { return true; },
                                        [](int64_t) { return true; },
                                        [](int64_t) { return true; },
                                        [](int64_t rank) { return rank != 1; },
                                        nobody,
                                        nobody,
                                        nobody};
      for (std::size_t step = 0; step < steps.size(); ++step) {
        CAPTURE(step);
        job.zero_grad();
        const CommCounter counter(mesh);
        job.backward(steps[step]);
        job.check_gradients();
        CHECK(sent(counter).exchanges == (step == 1 || step == 5 ? 1 : 0));
      }
    });
  }
}

TEST_CASE("a parameter that has gradients in some steps alone is watched for once") {
  on_data_ranks({2, 3}, [&](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    const CommCounter counter(mesh);
    for (int64_t step = 0; step < 12; ++step) {
      CAPTURE(step);
      job.zero_grad();
      job.backward([&](int64_t /*rank*/) { return step % 3 != 2; });
      job.check_gradients();
    }
    CHECK(sent(counter).exchanges == 2);
  });
}

TEST_CASE("a registered weight that another one has replaced is not reduced") {
  on_data_ranks({2}, [](const DeviceMesh& mesh) {
    torch::nn::Linear first(torch::nn::LinearOptions(10, 10).bias(false)), second(first->options);
    second->weight = first->weight;
    torch::nn::Sequential model(first, second);
    model->to(device(), at::kDouble);
    second->weight = first->weight;
    parallelize_module(model, mesh, {});
    for (int step = 0; step < 3; ++step) {
      const CommCounter counter(mesh);
      model->forward(from_local(cases().rows, mesh, {Shard(0), Replicate()})).square().sum().backward();
      CHECK(counter.bytes("all_reduce") == 8 * (10 * 10 + 1));
    }
  });
}

TEST_CASE("terms of a parameter that is frozen before they are reduced are reduced once more") {
  on_data_ranks({2, 3}, [](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    for (int step = 0; step < 2; ++step) {
      CAPTURE(step);
      job.zero_grad();
      job.train(/*up=*/true, /*down=*/true);
      {
        const AccumulateGradients guard(mesh);
        job.backward([](int64_t rank) { return rank == 0; });
      }
      job.train(/*up=*/true, /*down=*/false);
      job.backward();
      job.check_gradients();
      job.zero_grad();
      const CommCounter counter(mesh);
      job.backward();
      CHECK(sent(counter).bytes == kUpBytes);
      job.check_gradients();
    }
  });
}

TEST_CASE(
    "a reduced gradient, terms that only some ranks have and a backward that reduces add up alike on every rank") {
  struct Row {
    const char* why;
    Skips last;  // in the backward that reduces
  };
  const std::vector<Row> rows = {{"every rank has the gradient", nobody},
                                 {"a rank has none", [](int64_t rank) { return rank == 0; }},
                                 {"no rank has one", [](int64_t /*rank*/) { return true; }}};
  for (const Row& row : rows) {
    CAPTURE(row.why);
    for (const int64_t bytes : {kLarge, int64_t{1}}) {
      CAPTURE(bytes);
      on_data_ranks({2, 3, 4}, [&](const DeviceMesh& mesh) {
        Job job(mesh);
        parallelize_module(job.module, mesh, {}, buckets_of(bytes));
        for (int round = 0; round < 3; ++round) {  // the gradients of all rounds add up
          CAPTURE(round);
          job.backward();
          job.check_gradients();
          for (int i = 0; i < 2; ++i) {
            const AccumulateGradients guard(mesh);
            job.backward([](int64_t rank) { return rank != 1; });
          }
          job.backward(row.last);
          job.check_gradients();
        }
      });
    }
  }
}

TEST_CASE("so do those of parameters that data dimensions cut") {
  on_data_ranks({2, 3}, [](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {}, {.data_placement = Shard(0)});
    for (int round = 0; round < 3; ++round) {
      CAPTURE(round);
      job.backward();
      {
        const AccumulateGradients guard(mesh);
        job.backward();
      }
      job.backward();
      job.check_gradients();
    }
  });
}

TEST_CASE("a rank that cannot add a reduced gradient to its own fails the job, so that no other waits for it") {
  on_data_ranks({2, 3}, [](const DeviceMesh& mesh) {
    Job job(mesh);
    parallelize_module(job.module, mesh, {});
    const bool fails = mesh.local_rank("dp") == 0;
    const at::Tensor three = from_local(at::zeros({3}, on(at::kDouble)), mesh, {Replicate(), Replicate()});
    if (fails) job.module->up->bias.mutable_grad() = three;
    const std::string text = text_thrown_by([&] {
      job.own_loss().backward();
      full_tensor(from_local(at::ones({2}, on(at::kDouble)), mesh, {Shard(0), Replicate()}));
    });
    CAPTURE(text);
    CHECK_FALSE(text.empty());
    if (!fails) CHECK(text.find("rank 0 failed in gradient") != std::string::npos);
  });
}

namespace {

// Multiplies by a matrix as it is, whose gradient has other strides than the matrix.
struct ProductImpl : torch::nn::Module {
  ProductImpl() : weight(register_parameter("weight", numbers({10, 5}, 3))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (!writes) return torch::matmul(x, weight);
    const at::Tensor own = weight * 1;
    own.select(0, 0).zero_();
    return torch::matmul(x, own);
  }
  at::Tensor weight;
  bool writes = false;
};
TORCH_MODULE(Product);

}  // namespace

TEST_CASE("a gradient that autograd copies stays pending while gradients are added up, though a rank has none") {
  const at::Tensor rows = cases().rows.unsqueeze(0);
  const auto check = [&](const DeviceMesh& mesh, bool writes) {
    CAPTURE(writes);
    Product module, reference;
    module->writes = reference->writes = writes;
    parallelize_module(module, mesh, {});
    const auto loss = [&](Product& m, const at::Tensor& x) { return m->forward(x).square().sum(); };
    const at::Tensor x = from_local(rows, mesh, {Shard(0), Replicate()});
    {
      const AccumulateGradients guard(mesh);
      const CommCounter counter(mesh);
      if (mesh.local_rank("dp") != 0) loss(module, x).backward();
      CAPTURE(counter.to_string());
      CHECK(counter.total() == 0);
    }
    loss(module, x).backward();
    for (int64_t i = 0; i < 2 * mesh.size("dp") - 1; ++i) loss(reference, rows).backward();
    check_parameters(*module, *reference, /*gradients=*/true, 1e-11);
  };
  on_data_ranks({2, 3}, [&](const DeviceMesh& mesh) {
    check(mesh, false);
    check(mesh, true);
  });
}

TEST_CASE("gradients that two mesh dimensions cut together are added to a .grad of another layout") {
  const at::Tensor rows = numbers({1, 4, 8});
  torch::nn::MultiheadAttention plain(torch::nn::MultiheadAttentionOptions(8, 2));
  plain->to(at::kDouble);
  const auto loss_of = [](auto& attention, const at::Tensor& x) {
    const at::Tensor t = x.transpose(0, 1);
    return std::get<0>(attention(t, t, t)).square().mean();
  };
  for (int i = 0; i < 2; ++i) loss_of(plain, rows).backward();
  run_in_process(4, [&](const std::shared_ptr<World>& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, world);
    torch::nn::MultiheadAttention module(torch::nn::MultiheadAttentionOptions(8, 2));
    module->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      const auto from = plain->named_parameters();
      for (auto& item : module->named_parameters()) item.value().copy_(from[item.key()]);
    }
    auto attention = parallelize_module(module, mesh, {}, {.data_placement = Shard(0), .zero_stage = 2});
    const at::Tensor x = distribute_tensor(rows, mesh, {Shard(0), Shard(2)}, kNoSource);
    for (int step = 0; step < 2; ++step) {
      module->zero_grad(/*set_to_none=*/false);
      {
        const AccumulateGradients guard(mesh);
        loss_of(attention, x).backward();
      }
      loss_of(attention, x).backward();
      for (const auto& item : plain->named_parameters()) {
        CAPTURE(item.key());
        const at::Tensor grad = full_tensor(module->named_parameters()[item.key()].grad());
        CHECK(at::allclose(grad, item.value().grad(), 1e-9, 1e-12));
      }
    }
  });
}

TEST_CASE("refused: parameters that cannot be reduced together, and layouts that gradients cannot have") {
  using Make = std::function<std::vector<BucketedParameter>(const DeviceMesh&)>;
  const auto refused = [](const std::string& text, const Make& make,
                          const MeshDims& data_dims = std::vector<int64_t>{0}) {
    check_refused_on_every_rank({2, 2}, {"dp", "tp"}, text,
                                [&](const DeviceMesh& mesh) { bucket_gradients(make(mesh), data_dims); });
  };
  const auto one = [](const DeviceMesh& mesh, at::ScalarType dtype = at::kDouble) {
    const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate());
    const at::Tensor values = distribute_tensor(at::ones({4, 4}, dtype), mesh, whole, kNoSource);
    return BucketedParameter{.parameter = values, .gradient = whole};
  };
  using Parameters = std::vector<BucketedParameter>;
  refused(", and the first one on {dp: 2, tp: 2} on cpu; call it once for the parameters of each mesh",
          [&](const DeviceMesh& mesh) {
            return Parameters{one(mesh), one(mesh["tp"])};
          });
  refused("parameter 2 is listed twice; list it once", [&](const DeviceMesh& mesh) {
    const BucketedParameter first = one(mesh);
    return Parameters{first, one(mesh), first};
  });
  refused("parameter 0 is no DTensor; distribute it", [](const DeviceMesh&) {
    return Parameters{BucketedParameter{.parameter = at::ones({2}), .gradient = {Replicate(), Replicate()}}};
  });
  refused(
      "parameter 0 is to have a gradient laid out as [P(sum), R]; give 2 placements without Partial",
      [&](const DeviceMesh& mesh) {
        return Parameters{BucketedParameter{.parameter = one(mesh).parameter, .gradient = {Partial(), Replicate()}}};
      });
  refused("parameter 0 is to have a gradient laid out as [R]; give 2 placements", [&](const DeviceMesh& mesh) {
    return Parameters{BucketedParameter{.parameter = one(mesh).parameter, .gradient = {Replicate()}}};
  });
  const Make some = [&](const DeviceMesh& mesh) { return Parameters{one(mesh)}; };
  refused("bucket_gradients: data_dims: mesh dimension 2 is out of range for mesh {dp: 2, tp: 2}", some,
          std::vector<int64_t>{2});
  refused("has no mesh dimension 'pp'; there are: dp, tp", some, std::vector<std::string>{"pp"});
  CHECK_NOTHROW(bucket_gradients({one(fake_mesh(0, {2, 2}), at::kLong)}, {0}));
  const BucketedParameter known = one(fake_mesh(0, {2, 2}));
  CHECK_THROWS_WITH_AS(bucket_gradients({known}, {0}, {.dtype = at::kLong}),
                       doctest::Contains("bucket_gradients: gradient_buckets.dtype Long; give a floating one"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(bucket_gradients({known}, {0}, {.bucket_bytes = -1}),
                       doctest::Contains("bucket_gradients: gradient_buckets.bucket_bytes -1; give 0 or more"),
                       std::invalid_argument);
}

// Tests what is refused, by message: on every rank alike, before anything is sent. Ranks are those of fake worlds, one
// after another.

#include <filesystem>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/io/training_state.h"
#include "tessera/dtensor/io/weights.h"
#include "tessera/tests/placement/short_names.h"
#include "tessera/tests/styles/fake_mesh.h"

using namespace tessera;
using namespace tessera::testing;

namespace {

// Checks that `body(mesh)` throws a text with all of `parts` on each rank of a line of three.
template <class Body>
void refused(const std::vector<std::string>& parts, const Body& body) {
  for (int64_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    std::string text = "(nothing was thrown)";
    try {
      body(fake_mesh(rank, {3}, {"tp"}));
    } catch (const std::exception& error) {
      text = error.what();
    }
    CAPTURE(text);
    for (const std::string& part : parts) {
      CAPTURE(part);
      CHECK(text.find(part) != std::string::npos);
    }
  }
}

at::Tensor ones(const DeviceMesh& mesh, const Placements& placements, at::IntArrayRef shape = {6, 3},
                at::ScalarType dtype = at::kFloat) {
  return tessera::ones(shape, mesh, placements, dtype);
}
at::Tensor pending(const DeviceMesh& mesh) { return from_local(at::ones({6, 3}), mesh, {P}); }

}  // namespace

TEST_CASE("placements that do not fit") {
  refused({"distribute_tensor: 2 placements [R, R] for the mesh {tp: 3}"}, [](const DeviceMesh& mesh) {
    distribute_tensor(at::ones({6}), mesh, {R, R});
  });
  refused({"distribute_tensor: 0 placements"},
          [](const DeviceMesh& mesh) { distribute_tensor(at::ones({6}), mesh, {}); });
  refused({"distribute_tensor: S(1) is outside a tensor of 1 dimensions"},
          [](const DeviceMesh& mesh) { distribute_tensor(at::ones({6}), mesh, {Shard(1)}); });
  refused({"distribute_tensor: S(-2) is outside"},
          [](const DeviceMesh& mesh) { distribute_tensor(at::ones({6}), mesh, {Shard(-2)}); });
  refused({"from_local: S(0) is outside a tensor of 0 dimensions"},
          [](const DeviceMesh& mesh) { from_local(at::ones({}), mesh, {S0}); });
  refused({"from_local: 2 placements"}, [](const DeviceMesh& mesh) { from_local(at::ones({6}), mesh, {S0, R}); });
  refused({"redistribute: S(2) is outside a tensor of 2 dimensions"},
          [](const DeviceMesh& mesh) { redistribute(ones(mesh, {R}), {Shard(2)}); });
  refused({"redistribute: 2 placements"}, [](const DeviceMesh& mesh) { redistribute(ones(mesh, {R}), {R, R}); });
  refused({"to_local: grad_placements: 0 placements"},
          [](const DeviceMesh& mesh) { to_local(ones(mesh, {R}), Placements{}); });
  refused({"redistribute: grad_placements: S(7)"}, [](const DeviceMesh& mesh) {
    redistribute(ones(mesh, {R}), {S0}, {.grad_placements = Placements{Shard(7)}});
  });
  refused({"from_local: grad_placements: S(7)"}, [](const DeviceMesh& mesh) {
    from_local(at::ones({2}), mesh, {R}, {.grad_placements = Placements{Shard(7)}});
  });
  refused({"ones: S(5) is outside"}, [](const DeviceMesh& mesh) { ones(mesh, {Shard(5)}); });
  const Placement two = RaggedShard(0, {2, 4}), uneven = RaggedShard(0, {2, 1, 3});
  refused({"redistribute: grad_placements: [RS(0,2,4)] of shape [6, 3]", "has 2 parts"},
          [&](const DeviceMesh& mesh) { redistribute(ones(mesh, {R}), {S0}, {.grad_placements = Placements{two}}); });
  refused({"to_local: grad_placements: [RS(0,2,4)] of shape [6, 3]"},
          [&](const DeviceMesh& mesh) { to_local(ones(mesh, {R}), Placements{two}); });
  // Rank 0 has as many rows, and the others have not.
  refused({"to_local: grad_placements: rank 1 has [2, 3] of the tensor [6, 3] as [S(0)], but [1, 3] of a gradient as "
           "[RS(0,2,1,3)]"},
          [&](const DeviceMesh& mesh) { to_local(ones(mesh, {S0}), Placements{uneven}); });
  refused({"from_local: grad_placements: rank 0 has [2, 3] of the tensor [2, 3] as [R], but [1, 3]"},
          [](const DeviceMesh& mesh) {
            from_local(at::ones({2, 3}), mesh, {R}, {.grad_placements = Placements{S0}});
          });
}

TEST_CASE("pending reductions that are undefined") {
  const Placement avg = Partial(ReduceOp::kAvg);
  refused({"redistribute: avg of Long is not defined", "use sum and divide"},
          [&](const DeviceMesh& mesh) { redistribute(ones(mesh, {R}, {6}, at::kLong), {avg}); });
  refused({"from_local: avg of Int is not defined"},
          [&](const DeviceMesh& mesh) { from_local(at::ones({2}, at::kInt), mesh, {avg}); });
  refused({"from_local: sum of Bool is not defined", "use max (any) or min (all)"},
          [](const DeviceMesh& mesh) { from_local(at::ones({2}, at::kBool), mesh, {P}); });
  refused({"distribute_tensor: product of Bool is not defined"}, [](const DeviceMesh& mesh) {
    distribute_tensor(at::ones({2}, at::kBool), mesh, {Partial(ReduceOp::kProduct)});
  });
  refused(
      {"redistribute: max of ComplexFloat is not defined", "complex numbers have no order"},
      [](const DeviceMesh& mesh) { redistribute(ones(mesh, {R}, {6}, at::kComplexFloat), {Partial(ReduceOp::kMax)}); });
  refused({"zeros: [P(sum)] has a pending reduction, whose terms could be filled in many ways"},
          [](const DeviceMesh& mesh) { tessera::zeros({4}, mesh, {P}); });
  refused({"empty: the global shape [4, -1] has a negative size"}, [](const DeviceMesh& mesh) {
    tessera::empty({4, -1}, mesh, {R});
  });
  refused({"arange: the global shape [-3] has a negative size"},
          [](const DeviceMesh& mesh) { tessera::arange(-3, mesh, {R}); });
  refused({"arange: [P(sum)]"}, [](const DeviceMesh& mesh) { tessera::arange(4, mesh, {P}); });
  refused({"rand: [P(sum)]"}, [](const DeviceMesh& mesh) { tessera::rand({4}, mesh, {P}); });
  const DeviceMesh grid = fake_mesh(0, {2, 2}, {"dp", "tp"});
  CHECK_THROWS_WITH_AS(from_local(at::ones({2}), grid, {P, Partial(ReduceOp::kMax)}),
                       doctest::Contains("from_local: [P(sum), P(max)] has two kinds of reductions pending"),
                       std::invalid_argument);
  CHECK_NOTHROW(from_local(at::ones({2}), grid, {P, Partial(ReduceOp::kAvg)}));
  refused({"aten::normal_: random numbers cannot be drawn into a pending reduction"},
          [](const DeviceMesh& mesh) { pending(mesh).normal_(); });
  refused({"aten::uniform_: random numbers cannot be drawn", "[P(sum)]"},
          [](const DeviceMesh& mesh) { pending(mesh).uniform_(); });
}

TEST_CASE("from_local and distribute_tensor of the wrong thing") {
  refused({"from_local: the local tensor is undefined"}, [](const DeviceMesh& mesh) { from_local({}, mesh, {R}); });
  refused({"from_local: the tensor is a DTensor already; call redistribute"},
          [](const DeviceMesh& mesh) { from_local(ones(mesh, {R}), mesh, {R}); });
  refused({"from_local: the tensor is of layout Sparse; give a dense one, to_dense()"},
          [](const DeviceMesh& mesh) { from_local(at::eye(2).to_sparse(), mesh, {R}); });
  const at::Tensor quantized = at::quantize_per_tensor(at::ones({2}), /*scale=*/0.1, /*zero_point=*/0, at::kQInt8);
  refused({"from_local: the tensor is quantized, QInt8; dequantize it first"},
          [&](const DeviceMesh& mesh) { from_local(quantized, mesh, {R}); });
  refused({"distribute_tensor: the tensor is quantized, QInt8; dequantize it first"},
          [&](const DeviceMesh& mesh) { distribute_tensor(quantized, mesh, {R}); });
  refused({"distribute_in_place: the tensor is quantized, QInt8; dequantize it first"},
          [&](const DeviceMesh& mesh) { distribute_in_place(quantized, mesh, {R}); });
  refused({"from_local: stride without shape"},
          [](const DeviceMesh& mesh) { from_local(at::ones({2}), mesh, {R}, {.stride = std::vector<int64_t>{1}}); });
  refused({"from_local: stride [1] for shape [2, 2]; give one stride per dimension"}, [](const DeviceMesh& mesh) {
    from_local(at::ones({2, 2}), mesh, {R}, {.shape = std::vector<int64_t>{2, 2}, .stride = std::vector<int64_t>{1}});
  });
  refused({"from_local: the tensor is on meta", "move the tensor first"},
          [](const DeviceMesh& mesh) { from_local(at::ones({2}, at::kMeta), mesh, {R}); });
  refused({"from_local: this rank's piece is [2, 3], but [12, 3] as [S(0)]", "has [4, 3] here", "options.check"},
          [](const DeviceMesh& mesh) {
            from_local(at::ones({2, 3}), mesh, {S0}, {.shape = std::vector<int64_t>{12, 3}});
          });
  refused({"from_local: this rank's piece is [2], but [3] as [R]"},
          [](const DeviceMesh& mesh) { from_local(at::ones({2}), mesh, {R}, {.shape = std::vector<int64_t>{3}}); });
  refused({"distribute_tensor: the tensor is undefined"},
          [](const DeviceMesh& mesh) { distribute_tensor({}, mesh, {R}); });
  refused({"distribute_tensor: the tensor is a DTensor already", "[S(0)]", "call redistribute"},
          [](const DeviceMesh& mesh) { distribute_tensor(ones(mesh, {R}), mesh, {S0}); });
  refused({"distribute_tensor: the tensor is a DTensor already"}, [](const DeviceMesh& mesh) {
    distribute_tensor(ones(fake_mesh(mesh.world().rank(), {3}, {"other"}), {R}), mesh, {R});
  });
  refused({"distribute_tensor: src_rank 3 is not on the mesh {tp: 3}", "kNoSource"},
          [](const DeviceMesh& mesh) { distribute_tensor(at::ones({6}), mesh, {S0}, 3); });
  refused({"distribute_in_place: the tensor is undefined"},
          [](const DeviceMesh& mesh) { distribute_in_place({}, mesh, {R}); });
  refused({"distribute_in_place: the tensor is a DTensor already"},
          [](const DeviceMesh& mesh) { distribute_in_place(ones(mesh, {R}), mesh, {R}); });
  refused({"distribute_in_place: the tensor is the result of an operator"},
          [](const DeviceMesh& mesh) { distribute_in_place(at::ones({2}).requires_grad_(true) * 2, mesh, {R}); });
  refused({"distribute_in_place: S(4)"},
          [](const DeviceMesh& mesh) { distribute_in_place(at::ones({2}), mesh, {Shard(4)}); });
}

TEST_CASE("a plain tensor where a DTensor is needed") {
  for (const auto& ask : {+[] {
                            placements_of(at::ones({2, 3}));
                          },
                          +[] {
                            (void)mesh_of(at::ones({2, 3}));
                          },
                          +[] {
                            to_local(at::ones({2, 3}));
                          },
                          +[] {
                            redistribute(at::ones({2, 3}), {});
                          },
                          +[] {
                            full_tensor(at::ones({2, 3}));
                          },
                          +[] {
                            DTensor(at::ones({2, 3}));
                          }}) {
    CHECK_THROWS_WITH_AS(
        ask(), doctest::Contains("a plain tensor [2, 3] was given where a DTensor is needed; make one by from_local"),
        std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(spec_of(at::Tensor()), doctest::Contains("a plain tensor (undefined)"), std::invalid_argument);
}

TEST_CASE("plain tensors among DTensors") {
  const std::vector<std::string> ways_out = {"from_local", "distribute_tensor", "ImplicitReplication"};
  refused({"aten::add: a plain tensor [3] among DTensors", "Float [6, 3] on {tp: 3} on cpu as [S(0)]",
           "ImplicitReplication"},
          [](const DeviceMesh& mesh) { at::add(ones(mesh, {S0}), at::ones({3})); });
  refused({"aten::mm: a plain tensor [3, 4]"}, [](const DeviceMesh& mesh) {
    at::mm(ones(mesh, {S0}), at::ones({3, 4}));
  });
  refused({"aten::cat: a plain tensor [1, 3]"}, [](const DeviceMesh& mesh) {
    at::cat({ones(mesh, {S0}), at::ones({1, 3})});
  });
  refused({"aten::where", "a plain tensor [6, 3]"}, [](const DeviceMesh& mesh) {
    at::where(at::ones({6, 3}, at::kBool), ones(mesh, {S0}), ones(mesh, {S0}));
  });
  refused({"aten::mul", "a plain tensor [3]"},
          [](const DeviceMesh& mesh) { at::mul(at::ones({3}).requires_grad_(true), ones(mesh, {S0})); });
  refused({"aten::add_: a plain tensor [6, 3]"}, [](const DeviceMesh& mesh) {
    at::ones({6, 3}).add_(ones(mesh, {S0}));
  });
  refused({"aten::add_: a plain tensor [6, 3] would be written with the value of a DTensor",
           "make it a DTensor, by zeros_like or new_zeros of one"},
          [](const DeviceMesh& mesh) {
            const ImplicitReplication guard;
            at::ones({6, 3}).add_(ones(mesh, {R}));
          });
  refused({"aten::add_: a plain tensor [] would be written"},
          [](const DeviceMesh& mesh) { at::ones({}).add_(tessera::ones({}, mesh, {R})); });
  refused({"aten::embedding: a plain tensor [2]"},
          [](const DeviceMesh& mesh) { at::embedding(ones(mesh, {S0}), at::zeros({2}, at::kLong)); });
  // A plain 0-d tensor is the same on every rank.
  const DeviceMesh mesh = fake_mesh(1, {3}, {"tp"});
  CHECK(placements_of(ones(mesh, {S0}) * at::scalar_tensor(2)) == Placements{S0});
  const ImplicitReplication guard;
  CHECK(placements_of(ones(mesh, {S0}) + at::ones({3})) == Placements{S0});
}

TEST_CASE("DTensors on different meshes") {
  refused({"aten::add: DTensors on different meshes", "{tp: 3}", "{x: 3}", "full_tensor"}, [](const DeviceMesh& mesh) {
    at::add(ones(mesh, {R}), ones(DeviceMesh(mesh.world_ptr(), c10::kCPU, Mesh({3}, {"x"})), {R}));
  });
  refused({"aten::stack: DTensors on different meshes"}, [](const DeviceMesh& mesh) {
    at::stack({ones(mesh, {R}), ones(DeviceMesh(mesh.world_ptr(), c10::kCPU, Mesh({3}, {"tp"}, {2, 1, 0})), {R})});
  });
}

TEST_CASE("changes of shape or storage in place, and what does not fit into out=") {
  refused({"aten::resize_: a DTensor cannot change"}, [](const DeviceMesh& mesh) { ones(mesh, {R}).resize_({2}); });
  refused({"aten::squeeze_: of", "pieces would have to move; use the operator without the trailing underscore"},
          [](const DeviceMesh& mesh) {
            ones(mesh, {S0}, {1, 3}).squeeze_();
          });
  refused({"the result is [6, 3], and would be written to [2]; give a tensor of its sizes"},
          [](const DeviceMesh& mesh) {
            at::Tensor out = ones(mesh, {R}, {2});
            at::add_out(out, ones(mesh, {R}), ones(mesh, {R}));
          });
  refused({"output with shape [3] doesn't match the broadcast shape [6, 3]"},
          [](const DeviceMesh& mesh) { ones(mesh, {R}, {3}).add_(ones(mesh, {R})); });
}

TEST_CASE("a tensor on another device than its mesh") {
  const at::TensorOptions cuda = at::TensorOptions().device(at::kCUDA);
  refused({"to: ", "would go to cuda, where its mesh is not", "redistribute_to(x, mesh)"},
          [&](const DeviceMesh& mesh) { (void)at::_to_copy(ones(mesh, {S0}), cuda); });
  refused({"aten::zeros_like: ", "would give a tensor on cuda, where its mesh is not"}, [&](const DeviceMesh& mesh) {
    const at::Tensor d = ones(mesh, {S0});
    for (int call = 0; call < 3; ++call) (void)at::zeros_like(d);  // the decision that is kept is for no device
    (void)at::zeros_like(d, cuda);
  });
  refused({"aten::full_like: ", "leave the device out"},
          [&](const DeviceMesh& mesh) { (void)at::full_like(ones(mesh, {R}), 2, cuda); });
  refused({"aten::new_ones: ", "on cuda"}, [&](const DeviceMesh& mesh) {
    (void)ones(mesh, {S1}).new_ones({2, 3}, cuda);
  });
}

TEST_CASE("out= tensors of a batch norm that do not fit, before the running statistics are written") {
  for (const bool plain : {true, false}) {
    refused({"aten::_batch_norm_with_update: ", plain ? "result 0 would be written to a plain tensor; give a DTensor"
                                                      : "the result is [6, 3], and would be written to [6, 4]"},
            [&](const DeviceMesh& mesh) {
              const at::Tensor x = ones(mesh, {S0}), vector = ones(mesh, {R}, {3});
              at::Tensor mean = ones(mesh, {R}, {3}) * 5, variance = ones(mesh, {R}, {3}) * 7, a = ones(mesh, {R}, {3}),
                         b = ones(mesh, {R}, {3}), reserve = ones(mesh, {R}, {0}, at::kByte);
              at::Tensor out = plain ? at::ones({6, 3}) : ones(mesh, {S0}, {6, 4});
              try {
                at::_batch_norm_with_update_out(out, a, b, reserve, x, vector, vector, mean, variance, 0.1, 1e-5);
              } catch (...) {
                CHECK(to_local(mean).equal(at::full({3}, 5.0F)));
                CHECK(to_local(variance).equal(at::full({3}, 7.0F)));
                throw;
              }
            });
  }
}

TEST_CASE("what LibTorch refuses of the global shapes is refused on every rank, whatever its piece") {
  refused({"6x3 and 4x2"}, [](const DeviceMesh& mesh) { at::mm(ones(mesh, {S0}), ones(mesh, {R}, {4, 2})); });
  refused({"must match the size of tensor b"}, [](const DeviceMesh& mesh) {
    at::add(ones(mesh, {S0}), ones(mesh, {S0}, {5, 3}));
  });
  refused({"invalid for input of size 18"}, [](const DeviceMesh& mesh) { ones(mesh, {S0}).view({4, 4}); });
  refused({"out of range"}, [](const DeviceMesh& mesh) { at::sum(ones(mesh, {S0}), 2); });
  refused({"out of range"}, [](const DeviceMesh& mesh) { ones(mesh, {S0}).select(0, 6); });
}

namespace {

// Gives a tensor of one of a case's shapes and placements.
using Make = std::function<at::Tensor(at::IntArrayRef shape, Placement placement, at::ScalarType dtype)>;

struct Misfit {
  const char* name;
  std::function<void(const Make&)> run;
};

at::Tensor flags(const Make& make, at::IntArrayRef shape, Placement p) { return make(shape, p, at::kBool); }
at::Tensor reals(const Make& make, at::IntArrayRef shape, Placement p) { return make(shape, p, at::kDouble); }
at::Tensor whole_numbers(const Make& make, at::IntArrayRef shape, Placement p) { return make(shape, p, at::kLong); }

// Lists calls for which LibTorch has no meta kernel that would check the sizes. On three ranks a dimension of size 6
// has pieces of size 2, which fit what is replicated, and one of size 7 has pieces that fit those of size 6 on some
// ranks.
const std::vector<Misfit> kMisfits = {
    {"where", [](const Make& m) { at::where(flags(m, {6}, S0), reals(m, {2}, R), reals(m, {6}, S0)); }},
    {"logical_and", [](const Make& m) { at::logical_and(flags(m, {6}, S0), flags(m, {2}, R)); }},
    {"logical_or", [](const Make& m) { at::logical_or(flags(m, {2}, R), flags(m, {6}, S0)); }},
    {"logical_xor", [](const Make& m) { at::logical_xor(flags(m, {6}, S0), flags(m, {2}, R)); }},
    {"logical_and of pieces", [](const Make& m) { at::logical_and(flags(m, {7}, S0), flags(m, {6}, S0)); }},
    {"huber_loss", [](const Make& m) { at::huber_loss(reals(m, {6}, S0), reals(m, {2}, R), at::Reduction::None); }},
    {"binary_cross_entropy",
     [](const Make& m) { at::binary_cross_entropy(reals(m, {6}, S0), reals(m, {2}, R), {}, at::Reduction::None); }},
    {"polar", [](const Make& m) { at::polar(reals(m, {6}, S0), reals(m, {2}, R)); }},
    {"complex", [](const Make& m) { at::complex(reals(m, {2}, R), reals(m, {6}, S0)); }},
    {"floor_divide", [](const Make& m) { at::floor_divide(reals(m, {6}, S0), reals(m, {2}, R)); }},
    {"__lshift__", [](const Make& m) { at::__lshift__(whole_numbers(m, {6}, S0), whole_numbers(m, {2}, R)); }},
    {"_prelu_kernel", [](const Make& m) { at::_prelu_kernel(reals(m, {6}, S0), reals(m, {2}, R)); }},
    {"masked_fill_", [](const Make& m) { reals(m, {6}, S0).masked_fill_(flags(m, {2}, R), 5); }},
    {"linalg_solve_triangular",
     [](const Make& m) {
       at::linalg_solve_triangular(reals(m, {6, 3, 3}, S0), reals(m, {2, 3, 2}, R), /*upper=*/true);
     }},
    {"searchsorted",
     [](const Make& m) {
       at::searchsorted(reals(m, {6, 3}, S0), reals(m, {2, 3}, R));
     }},
    {"searchsorted in one row of sequences",
     [](const Make& m) {
       at::searchsorted(reals(m, {3, 5}, S0), reals(m, {1, 3}, R));
     }},
    {"searchsorted to both sides",
     [](const Make& m) { at::searchsorted(reals(m, {5}, R), reals(m, {6}, S0), false, /*right=*/true, "left"); }},
    {"linalg_householder_product",
     [](const Make& m) {
       at::linalg_householder_product(reals(m, {1, 3, 2}, R), reals(m, {3, 2}, S0));
     }},
    {"ormqr",
     [](const Make& m) {
       at::ormqr(reals(m, {3, 4, 2}, S0), reals(m, {3, 2}, S0), reals(m, {1, 4, 2}, R));
     }},
    {"var of whole numbers",
     [](const Make& m) {
       whole_numbers(m, {6, 2}, Shard(1)).var(0);
     }},
    {"std of a dimension that is not there",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).std(7);
     }},
    {"flip",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).flip({5});
     }},
    {"roll",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).roll({1, 2}, {0});
     }},
    {"nansum",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).nansum(5);
     }},
    {"median",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).median(5);
     }},
    {"kthvalue",
     [](const Make& m) {
       reals(m, {6, 2}, Shard(1)).kthvalue(100, 0);
     }},
    {"histc", [](const Make& m) { reals(m, {6}, S0).histc(0, 0, 1); }},
    {"index_put_",
     [](const Make& m) {
       reals(m, {4, 6}, Shard(1)).index_put_({whole_numbers(m, {1}, R)}, reals(m, {1, 2}, R));
     }},
    {"index_put_ by indices that do not broadcast",
     [](const Make& m) {
       reals(m, {4, 4}, R).index_put_({whole_numbers(m, {6}, S0), whole_numbers(m, {2}, R)}, reals(m, {6}, S0), true);
     }},
    {"index_copy_",
     [](const Make& m) {
       reals(m, {4, 6}, Shard(1)).index_copy_(0, whole_numbers(m, {2}, R), reals(m, {2, 7}, Shard(1)));
     }},
    {"dot", [](const Make& m) { at::dot(reals(m, {7}, S0), reals(m, {6}, S0)); }},
    {"vdot", [](const Make& m) { at::vdot(reals(m, {6}, S0), reals(m, {7}, S0)); }},
    {"addbmm",
     [](const Make& m) {
       at::addbmm(reals(m, {3, 3}, R), reals(m, {7, 3, 2}, S0), reals(m, {6, 2, 3}, S0));
     }},
    {"addbmm with a bias of another size",
     [](const Make& m) {
       at::addbmm(reals(m, {3, 2}, R), reals(m, {4, 3, 2}, R), reals(m, {4, 2, 6}, Shard(2)));
     }},
    {"multi_margin_loss",
     [](const Make& m) {
       at::multi_margin_loss(reals(m, {7, 3}, S0), whole_numbers(m, {6}, S0));
     }},
    {"multilabel_margin_loss",
     [](const Make& m) {
       at::multilabel_margin_loss(reals(m, {7, 3}, S0), whole_numbers(m, {6, 3}, S0));
     }},
    {"grid_sampler_2d",
     [](const Make& m) {
       at::grid_sampler_2d(reals(m, {7, 1, 4, 4}, S0), reals(m, {6, 2, 2, 2}, S0), 0, 0, false);
     }},
    {"nll_loss2d",
     [](const Make& m) {
       at::nll_loss2d(reals(m, {7, 3, 2, 2}, S0), whole_numbers(m, {6, 2, 2}, S0));
     }},
    {"attention with a mask of other sizes",
     [](const Make& m) {
       at::scaled_dot_product_attention(reals(m, {1, 2, 6, 4}, Shard(2)), reals(m, {1, 2, 6, 4}, R),
                                        reals(m, {1, 2, 6, 4}, R), reals(m, {2, 6}, R));
     }},
    {"nll_loss2d of one class per item",
     [](const Make& m) {
       at::nll_loss2d(reals(m, {6, 3, 2, 2}, S0), whole_numbers(m, {6}, S0));
     }},
    {"mm of two dtypes, with a rank without elements",
     [](const Make& m) {
       at::mm(reals(m, {2, 3}, S0), m({3, 2}, R, at::kFloat));
     }},
    {"linear of two dtypes, with a bias",
     [](const Make& m) {
       at::linear(reals(m, {2, 3}, S0), m({2, 3}, R, at::kFloat), m({2}, R, at::kFloat));
     }},
    {"dot with a number", [](const Make& m) { at::dot(reals(m, {6}, S0), reals(m, {}, R)); }},
    {"huber_loss by a delta of 0, with a rank without elements",
     [](const Make& m) { at::huber_loss(reals(m, {2}, S0), reals(m, {2}, S0), at::Reduction::Mean, 0); }},
    {"nll_loss2d of classes in int32",
     [](const Make& m) {
       at::nll_loss2d(reals(m, {2, 3, 2, 2}, S0), m({2, 2, 2}, S0, at::kInt));
     }},
    {"cross_entropy of classes in int32",
     [](const Make& m) {
       at::cross_entropy_loss(reals(m, {2, 3}, Shard(1)), m({2}, R, at::kInt));
     }},
    {"cross_entropy with weights of another dtype",
     [](const Make& m) {
       at::cross_entropy_loss(reals(m, {2, 3}, Shard(1)), whole_numbers(m, {2}, R), m({3}, R, at::kFloat));
     }},
    {"attention of whole numbers",
     [](const Make& m) {
       const at::Tensor x = whole_numbers(m, {2, 2, 6, 4}, S0);
       at::scaled_dot_product_attention(x, x, x);
     }},
    {"logical_and_ that would have to grow its self",
     [](const Make& m) {
       flags(m, {1, 2}, Shard(1)).logical_and_(flags(m, {4, 2}, R));
     }},
    {"linalg_solve_triangular with other rows, with a rank without elements",
     [](const Make& m) {
       at::linalg_solve_triangular(reals(m, {2, 3, 3}, S0), reals(m, {2, 4, 2}, S0), /*upper=*/true);
     }},
    {"max_unpool2d with other indices",
     [](const Make& m) {
       at::max_unpool2d(reals(m, {2, 2, 2}, S0), whole_numbers(m, {2, 3, 3}, S0), {4, 4});
     }},
    {"grid_sampler_2d with a grid of three coordinates",
     [](const Make& m) {
       at::grid_sampler_2d(reals(m, {2, 1, 4, 4}, S0), reals(m, {2, 2, 2, 3}, S0), 0, 0, false);
     }},
    {"multi_margin_loss with other weights",
     [](const Make& m) {
       at::multi_margin_loss(reals(m, {2, 3}, S0), whole_numbers(m, {2}, S0), 1, 1, reals(m, {4}, R));
     }},
    {"fold with a kernel of size 0",
     [](const Make& m) {
       at::col2im(reals(m, {6, 8, 9}, S0), {4, 4}, {0, 2}, {1, 1}, {0, 0}, {1, 1});
     }},
    {"max_unpool2d to too many sizes",
     [](const Make& m) {
       at::max_unpool2d(reals(m, {6, 2, 2}, S0), whole_numbers(m, {6, 2, 2}, S0), {1, 1, 4, 4});
     }},
    {"reflection_pad2d by too many amounts",
     [](const Make& m) {
       at::reflection_pad2d(reals(m, {6, 4, 4}, S0), {1, 1, 1, 1, 1, 1, 1, 1});
     }},
    {"conv_transpose1d with too large an output_padding",
     [](const Make& m) {
       at::conv_transpose1d(reals(m, {1, 2, 60}, Shard(2)), reals(m, {2, 3, 3}, R), {}, 1, 0, /*output_padding=*/1);
     }},
    {"a norm of negative order over no elements",
     [](const Make& m) {
       at::linalg_vector_norm(reals(m, {6, 0}, S0), -1, at::IntArrayRef({1}));
     }},
    {"batch_norm in evaluation without statistics",
     [](const Make& m) {
       at::batch_norm(reals(m, {6, 3}, S0), {}, {}, {}, {}, false, 0.1, 1e-5, true);
     }},
    {"batch_norm with statistics of too few channels",
     [](const Make& m) {
       const at::Tensor one = reals(m, {1}, R);
       at::batch_norm(reals(m, {6, 3}, S0), {}, {}, one, one, false, 0.1, 1e-5, true);
     }},
    {"batch_norm with a weight of too few channels",
     [](const Make& m) {
       at::batch_norm(reals(m, {6, 3}, S0), reals(m, {1}, R), {}, {}, {}, true, 0.1, 1e-5, true);
     }},
};

std::string error_of(const Misfit& misfit, const Make& make) {
  try {
    misfit.run(make);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));  // without LibTorch's stack
  }
  return "(nothing was thrown)";
}

}  // namespace

TEST_CASE("sizes that LibTorch checks by its kernels alone are refused on every rank, by one error") {
  for (const Misfit& misfit : kMisfits) {
    const std::string name = misfit.name;
    CAPTURE(name);
    const std::string plain = error_of(misfit, [](at::IntArrayRef shape, const Placement&, at::ScalarType dtype) {
      return at::zeros(shape, at::TensorOptions(dtype));
    });
    CHECK(plain != "(nothing was thrown)");
    std::vector<std::string> texts;
    for (int64_t rank = 0; rank < 3; ++rank) {
      const DeviceMesh mesh = fake_mesh(rank, {3}, {"tp"});
      texts.push_back(error_of(misfit, [&](at::IntArrayRef shape, const Placement& p, at::ScalarType dtype) {
        return tessera::zeros(shape, mesh, {p}, dtype);
      }));
    }
    CAPTURE(texts[0]);
    CAPTURE(texts[1]);
    CAPTURE(texts[2]);
    CHECK(texts[0] != "(nothing was thrown)");
    CHECK(texts[1] == texts[0]);
    CHECK(texts[2] == texts[0]);
  }
}

TEST_CASE("what LibTorch refuses, and our kernels could compute") {
  refused({"_pad_packed_sequence: batch_sizes [1, 2]"}, [](const DeviceMesh& mesh) {
    at::_pad_packed_sequence(ones(mesh, {S0}), at::tensor({1, 2}, at::kLong), false, 0, -1);
  });
  refused({"_pad_packed_sequence: batch_sizes is a tensor of 1 dimensions of Float"}, [](const DeviceMesh& mesh) {
    at::_pad_packed_sequence(ones(mesh, {S0}), at::tensor({2.0F, 1.0F}), false, 0, -1);
  });
  refused({"_pack_padded_sequence: lengths is a tensor of 1 dimensions of Int"}, [](const DeviceMesh& mesh) {
    at::_pack_padded_sequence(ones(mesh, {S0}, {6, 2, 3}), at::tensor({2, 1}, at::kInt), false);
  });
  refused({"tensor_split: tensor_indices_or_sections has 1 dimensions of Float"},
          [](const DeviceMesh& mesh) { at::tensor_split(ones(mesh, {S0}), at::tensor({1.5F})); });
  const auto vector = [](const DeviceMesh& mesh, at::ScalarType dtype) { return ones(mesh, {R}, {3}, dtype); };
  const auto norm = [&](const DeviceMesh& mesh, at::ScalarType x, at::ScalarType weight, at::ScalarType statistics) {
    const at::Tensor mean = vector(mesh, statistics);
    at::batch_norm(ones(mesh, {S0}, {6, 3}, x), vector(mesh, weight), {}, mean, mean, true, 0.1, 1e-5, true);
  };
  refused({"batch_norm: weight is of Double, the input of Float"},
          [&](const DeviceMesh& mesh) { norm(mesh, at::kFloat, at::kDouble, at::kFloat); });
  refused({"batch_norm: running_mean is of Double, the input of Half; give one dtype, or Float beside the input"},
          [&](const DeviceMesh& mesh) { norm(mesh, at::kHalf, at::kHalf, at::kDouble); });
  refused({"batch_norm: the input is of ComplexFloat"},
          [&](const DeviceMesh& mesh) { norm(mesh, at::kComplexFloat, at::kFloat, at::kFloat); });
  const auto attend = [](const DeviceMesh& mesh, at::ScalarType mask, double dropout) {
    const at::Tensor x = ones(mesh, {S0}, {6, 2, 4, 4});
    at::scaled_dot_product_attention(x, x, x, ones(mesh, {R}, {4, 4}, mask), dropout);
  };
  refused({"the mask is of Double, the query of Float"},
          [&](const DeviceMesh& mesh) { attend(mesh, at::kDouble, 0.5); });
  refused({"dropout_p is -0.5; give a probability from 0 to 1"},
          [&](const DeviceMesh& mesh) { attend(mesh, at::kFloat, -0.5); });
}

TEST_CASE("one_hot without classes, and with classes below 0") {
  const auto classes = [](const DeviceMesh& mesh, int64_t value) {
    return tessera::full({6}, value, mesh, {R}, at::kLong);
  };
  refused({"one_hot: num_classes is 0; give 1 or more, or -1 for one more than the greatest class"},
          [&](const DeviceMesh& mesh) { at::one_hot(ones(mesh, {S0}, {6}, at::kLong), 0); });
  refused({"one_hot: num_classes is -2"}, [&](const DeviceMesh& mesh) { at::one_hot(classes(mesh, 0), -2); });
  refused({"one_hot: the greatest class is -1; classes count from 0"},
          [&](const DeviceMesh& mesh) { at::one_hot(classes(mesh, -1), -1); });
}

TEST_CASE("a DTensor whose memory is read says that it has none: printed, by an accessor, by a pointer") {
  const std::vector<std::string> parts = {"a DTensor has no memory of its own",
                                          "printing (std::cout << t), accessor() and data_ptr()",
                                          "tessera::to_string(t)", "to_local(t)", "full_tensor(t)"};
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {6}, {6, 3}, {6, 3, 2}}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kLong}) {
      refused(parts, [&](const DeviceMesh& mesh) {
        std::ostringstream out;
        out << ones(mesh, {R}, shape, dtype);
      });
    }
  }
  refused(parts, [](const DeviceMesh& mesh) {
    std::ostringstream out;
    at::print(out, ones(mesh, {S0}).requires_grad_(), 80);
  });
  refused(parts, [](const DeviceMesh& mesh) {
    const at::Tensor converted = at::ones({6, 3});
    distribute_in_place(converted, mesh, {S0});
    std::ostringstream out;
    out << converted;
  });
  refused(parts, [](const DeviceMesh& mesh) {
    const at::Tensor t = ones(mesh, {S0});
    (void)t.accessor<float, 2>();
  });
  refused(parts, [](const DeviceMesh& mesh) {
    const at::Tensor t = ones(mesh, {S0});
    (void)t.packed_accessor64<float, 2>();
  });
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {S0}).data_ptr(); });
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {S0}).mutable_data_ptr<float>(); });
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {S0}).const_data_ptr<float>(); });
  const DeviceMesh mesh = fake_mesh(1, {3}, {"tp"});
  CHECK(to_string(ones(mesh, {S0}, {7, 3})) == "DTensor Float [7, 3] on {tp: 3} on cpu as [S(0)], here [3, 3]");
}

TEST_CASE("a DTensor does not become sparse: its to_dense would give sparse pieces back") {
  const std::vector<std::string> parts = {"a DTensor's pieces are strided", "call full_tensor, or to_local"};
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {S0}).to_sparse().to_dense(); });
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {Replicate()}).to_sparse_csr(); });
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {Replicate()}).to_mkldnn(); });
}

TEST_CASE("a plain sparse tensor beside DTensors, and a sparse tensor of DTensors") {
  const auto adjacency = [](bool by_rows) {
    const at::Tensor out = at::eye(3).to_sparse();
    return by_rows ? out.to_sparse_csr() : out;
  };
  const std::vector<std::string> parts = {"a sparse tensor of sizes [3, 3] among DTensors", "to_dense()", "index_add"};
  for (const bool by_rows : {false, true}) {
    const at::Tensor sparse = adjacency(by_rows);
    refused(parts, [&](const DeviceMesh& mesh) { at::mm(sparse, ones(mesh, {S0}, {3, 2})); });
    refused(parts, [&](const DeviceMesh& mesh) {
      const ImplicitReplication guard;
      at::matmul(sparse, ones(mesh, {Replicate()}, {3, 2}));
    });
  }
  refused({"it would make a sparse tensor of DTensors", "full_tensor(x)"}, [](const DeviceMesh& mesh) {
    const at::Tensor places = tessera::zeros({2, 1}, mesh, {Replicate()}, at::kLong);
    at::sparse_coo_tensor(places, ones(mesh, {Replicate()}, {1}), {3, 3});
  });
}

TEST_CASE(
    "a DTensor whose storage is read says that it has none: storage(), pickled, torch::save of it, a module, an "
    "optimizer") {
  const std::vector<std::string> parts = {
      "a DTensor has no storage of its own, which storage(), is_alias_of() and torch::save read",
      "to_local(a).is_alias_of(to_local(b))",
      "to_local(t)",
      "full_tensor(t)",
      "save_weights and load_weights of a module",
      "save_optimizer and load_optimizer of an optimizer"};
  refused(parts, [](const DeviceMesh& mesh) { (void)ones(mesh, {S0}).storage(); });
  refused(parts, [](const DeviceMesh& mesh) {
    const at::Tensor t = ones(mesh, {S0});
    (void)t.is_alias_of(t);
  });
  refused(parts, [](const DeviceMesh& mesh) { (void)torch::jit::pickle_save(ones(mesh, {S0})); });
  refused(parts, [](const DeviceMesh& mesh) {
    std::ostringstream out;
    torch::save(ones(mesh, {S0}), out);
  });
  refused(parts, [](const DeviceMesh& mesh) {
    const torch::nn::Linear linear(3, 6);
    distribute_in_place(linear->weight, mesh, {S0});
    std::ostringstream out;
    torch::save(linear, out);
  });
  refused(parts, [](const DeviceMesh& mesh) {
    const at::Tensor parameter = ones(mesh, {S0}).requires_grad_();
    torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
    parameter.sum().backward();
    optimizer.step();
    std::ostringstream out;
    torch::save(optimizer, out);
  });
}

TEST_CASE("files are not saved from a fake world of several ranks") {
  const std::vector<std::string> parts = {"is of a fake world, whose ranks have no values but this one's",
                                          "save in a job of 3 ranks"};
  const std::string folder = std::filesystem::temp_directory_path() / "fake_world";
  const auto module = [](const DeviceMesh& mesh) {
    torch::nn::Linear linear(3, 6);
    distribute_in_place(linear->weight, mesh, {S0}, kNoSource);
    return linear;
  };
  refused(parts, [&](const DeviceMesh& mesh) { save_weights(*module(mesh), folder + "/m.safetensors"); });
  refused(parts, [&](const DeviceMesh& mesh) {
    torch::nn::Linear model = module(mesh);
    save_training_state({.mesh = mesh, .model = *model}, folder);
  });
  CHECK_FALSE(std::filesystem::exists(folder));
}

TEST_CASE("Strict refuses what would communicate on its own, and says what") {
  refused({"aten::mm: would communicate on its own, which Strict forbids", "all_gather on tp: [S(1)] -> [R]",
           "Redistribute the inputs explicitly"},
          [](const DeviceMesh& mesh) {
            const Strict strict;
            at::mm(ones(mesh, {S0}), ones(mesh, {Shard(1)}, {3, 2}));
          });
  refused({"aten::mul: would communicate on its own, which Strict forbids", "give a number, such as x * 0.5"},
          [](const DeviceMesh& mesh) {
            const Strict strict;
            const ImplicitReplication plain_counts;
            at::mul(pending(mesh), at::scalar_tensor(0.5));
          });
  refused({"Strict forbids"}, [](const DeviceMesh& mesh) {
    const Strict strict;
    at::relu(pending(mesh));
  });
  refused({"aten::_softmax", "Strict forbids"}, [](const DeviceMesh& mesh) {
    const Strict strict;
    at::softmax(ones(mesh, {S0}), 0);
  });
  refused({"Strict forbids"}, [](const DeviceMesh& mesh) {
    const Strict strict;
    at::_foreach_add(std::vector<at::Tensor>{ones(mesh, {S0})}, std::vector<at::Tensor>{ones(mesh, {Shard(1)})});
  });
  const DeviceMesh mesh = fake_mesh(0, {3}, {"tp"});
  const Strict strict;
  CHECK_NOTHROW(redistribute(ones(mesh, {S0}), {R}));
  CHECK_NOTHROW(full_tensor(ones(mesh, {S0})));
  CHECK_NOTHROW(ones(mesh, {S0}).sum().item<float>());
  CHECK_NOTHROW(at::mm(ones(mesh, {S0}), ones(mesh, {R}, {3, 2})));
  {
    const Strict lenient(false);
    CHECK_NOTHROW(at::softmax(ones(mesh, {S0}), 0));
  }
  CHECK(Strict::enabled());
}

TEST_CASE("reading a view that had to be a copy, after what it viewed was written, is refused") {
  const DeviceMesh mesh = fake_mesh(1, {3}, {"tp"});
  const auto write_then = [&](const auto& write, const auto& read) {
    at::Tensor x = ones(mesh, {S0});
    const at::Tensor view = x.unfold(0, 2, 1).select(0, 0);
    read(view);
    write(x);
    CHECK_THROWS_WITH_AS(read(view), doctest::Contains("a copy that aten::unfold made"), std::runtime_error);
    CHECK_THROWS_WITH_AS(read(view), doctest::Contains("has been written since"), std::runtime_error);
    read(x.unfold(0, 2, 1).select(0, 0));
    read(x);
  };
  const auto add = [](at::Tensor& x) { x.add_(1); };
  write_then(add, [](const at::Tensor& t) { t + 1; });
  write_then(add, [](const at::Tensor& t) { to_local(t); });
  write_then(add, [](const at::Tensor& t) { full_tensor(t); });
  write_then([](at::Tensor& x) { x.detach().view({-1}).zero_(); }, [](const at::Tensor& t) { t.neg(); });
  write_then([](at::Tensor& x) { x.select(1, 0).zero_(); }, [](const at::Tensor& t) { t.neg(); });
}

TEST_CASE("writing a copy that is no view of moved pieces is refused") {
  const auto imaginary = [](const DeviceMesh& mesh) {
    return at::imag(at::complex(ones(mesh, {S0}), ones(mesh, {S0})).conj());
  };
  refused({"aten::zero_: would write Float [6, 3]", "a copy that aten::view_as_real made",
           "redistribute the viewed tensor first"},
          [&](const DeviceMesh& mesh) { imaginary(mesh).zero_(); });
  refused({"a copy that aten::view_as_real made"},
          [&](const DeviceMesh& mesh) { imaginary(mesh).select(0, 0).fill_(1); });
  refused({"aten::_foreach_add_", "a copy"}, [&](const DeviceMesh& mesh) { at::_foreach_add_({imaginary(mesh)}, 1); });
  const DeviceMesh mesh = fake_mesh(1, {3}, {"tp"});
  CHECK_NOTHROW(imaginary(mesh).clone().zero_());
  CHECK_NOTHROW(ones(mesh, {S0}).unfold(0, 2, 1).zero_());
}

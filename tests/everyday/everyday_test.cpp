// Makes common calls on five layouts of four ranks, and compares results and gradients with plain tensors and
// collectives with each row of the table.

#include <map>
#include <mutex>
#include <sstream>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/dtensor/core/modes.h"
#include "tessera/dtensor/dispatch/dispatcher.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/mesh/collectives/comm_counter.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/mesh/in_process.h"
#include "tessera/tests/everyday/outcome.h"
#include "tessera/tests/everyday/row.h"
#include "tessera/tests/ops/rules/pieces.h"

namespace tessera::testing {
namespace {

struct Column {
  const char* name;
  std::vector<int64_t> mesh_shape;
  Placements placements;  // for a tensor of six rows
};

std::vector<Column> columns_of_table() {
  return {{"S(0)", {4}, {Shard(0)}},
          {"S(1)", {4}, {Shard(1)}},
          {"P(sum)", {4}, {Partial()}},
          {"Ragged(0)", {4}, {RaggedShard(0, {3, 0, 2, 1})}},
          {"[S(0), S(1)]", {2, 2}, {Shard(0), Shard(1)}}};
}

Placements fitting(const Column& column, const at::Tensor& t) {
  if (column.placements[0] == RaggedShard(0, {3, 0, 2, 1}) && t.size(0) == 4) return {RaggedShard(0, {1, 0, 2, 1})};
  if (column.placements[0].is_partial() && t.scalar_type() == at::kBool) return {Replicate()};
  return column.placements;
}

Operands make_operands() {
  at::manual_seed(21);
  const auto normal = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); };
  return {.x = normal({6, 5}),
          .y = normal({6, 5}),
          .mask = at::rand({6, 5}) < 0.5,
          .image = normal({4, 4, 6, 6}),
          .heads = normal({4, 2, 6, 8}),
          .weight = normal({5, 4}),
          .vector = normal({5}),
          .rows = at::tensor({0, 2, 5, 2, 1, 4}, at::kLong),
          .columns = at::randint(0, 5, {6, 5}, at::kLong),
          .classes = at::tensor({0, 2, 4, 2, 1, 3}, at::kLong),
          .filter = normal({3, 4, 3, 3})};
}

// Returns new tensors with the same values.
Operands whole_operands() {
  static const Operands made = make_operands();
  Operands out = made;
  for (at::Tensor Operands::*member :
       {&Operands::x, &Operands::y, &Operands::mask, &Operands::image, &Operands::heads, &Operands::weight,
        &Operands::vector, &Operands::rows, &Operands::columns, &Operands::classes, &Operands::filter}) {
    out.*member = (made.*member).clone();
  }
  return out;
}

// Returns the operands that have the column's layout.
std::vector<at::Tensor Operands::*> spread_operands() {
  return {&Operands::x, &Operands::y, &Operands::mask, &Operands::image, &Operands::heads};
}
std::vector<at::Tensor Operands::*> replicated_operands() {
  return {&Operands::weight,  &Operands::vector,  &Operands::rows,
          &Operands::columns, &Operands::classes, &Operands::filter};
}

void require_grad(Operands& operands) {
  for (at::Tensor Operands::*member : {&Operands::x, &Operands::y, &Operands::image, &Operands::heads,
                                       &Operands::weight, &Operands::vector, &Operands::filter}) {
    (operands.*member).requires_grad_(true);
  }
}

Tensors grads_of(const Operands& o) {
  Tensors out;
  for (const at::Tensor& t : {o.x, o.y, o.image, o.heads, o.weight, o.vector, o.filter})
    out.push_back(t.grad().defined() ? whole_of(t.grad()) : at::Tensor());
  return out;
}

std::string letters_of(const CommCounter& counter) {
  static const std::map<std::string, char> letters = {{"all_gather", 'g'}, {"all_reduce", 'r'}, {"reduce_scatter", 's'},
                                                      {"all_to_all", 'a'}, {"broadcast", 'b'},  {"scatter", 'c'},
                                                      {"permute", 'p'}};
  std::string out;
  for (const CollectiveRecord& record : counter.records()) {
    const auto found = letters.find(std::string(record.kind));
    out += found == letters.end() ? '?' : found->second;
  }
  return out.empty() ? "-" : out;
}

Outcome run_plain(const Row& row) {
  Operands operands = whole_operands();
  require_grad(operands);
  Outcome out{.results = row.run(operands), .grads = {}, .collectives = {}};
  if (const at::Tensor loss = loss_of(out.results); loss.defined()) {
    loss.backward();
    for (const at::Tensor& t :
         {operands.x, operands.y, operands.image, operands.heads, operands.weight, operands.vector, operands.filter}) {
      out.grads.push_back(t.grad());
    }
  }
  return out;
}

Outcome run_rank(const Row& row, const Column& column, const std::vector<Tensors>& pieces,
                 const std::shared_ptr<World>& world) {
  const DeviceMesh mesh = init_device_mesh("cpu", column.mesh_shape, {}, world);
  Operands operands = whole_operands();
  std::size_t next = 0;
  for (at::Tensor Operands::*member : spread_operands()) {
    const at::Tensor whole = operands.*member;
    operands.*member =
        from_local(pieces[next++][static_cast<std::size_t>(world->rank())].contiguous(), mesh, fitting(column, whole),
                   {.shape = whole.sizes().vec(), .stride = whole.strides().vec()});
  }
  const Placements replicated(column.mesh_shape.size(), Replicate());
  for (at::Tensor Operands::*member : replicated_operands()) {
    operands.*member = from_local(operands.*member, mesh, replicated);
  }
  require_grad(operands);
  const ImplicitReplication guard;
  CommCounter counter(*world);
  Outcome out{.results = row.run(operands), .grads = {}, .collectives = letters_of(counter)};
  if (const at::Tensor loss = loss_of(out.results); loss.defined()) {
    counter.reset();
    loss.backward();
    out.collectives += '/' + letters_of(counter);
    out.grads = grads_of(operands);
  }
  for (at::Tensor& t : out.results) t = whole_of(t.detach());
  return out;
}

// Returns the collectives on that layout, and after them what is wrong, if anything.
std::string check_column(const Row& row, const Column& column, const Outcome& plain) {
  const Operands whole = whole_operands();
  std::vector<Tensors> pieces;
  for (at::Tensor Operands::*member : spread_operands()) {
    pieces.push_back(distribute(whole.*member, fitting(column, whole.*member), column.mesh_shape));
  }
  std::mutex mutex;
  std::string collectives;
  std::string wrong;
  try {
    run_in_process(4, [&](const std::shared_ptr<World>& world) {
      const Outcome mine = run_rank(row, column, pieces, world);
      const std::string text = compare(mine, plain);
      const std::lock_guard lock(mutex);
      if (world->rank() == 0) collectives = mine.collectives;
      if (!text.empty()) wrong = text;
    });
  } catch (const std::exception& error) {
    wrong = message(error).substr(0, 300);
  }
  return wrong.empty() ? collectives : collectives + " WRONG " + wrong;
}

int checked = 0;

void check(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    std::istringstream expected(row.expected);
    const Outcome plain = run_plain(row);
    for (const Column& column : columns_of_table()) {
      std::string wanted;
      expected >> wanted;
      const std::string found = check_column(row, column, plain);
      CHECK_MESSAGE(found == wanted, fmt::format("ROW {} | {} | {}", row.call, column.name, found));
    }
    ++checked;
  }
}

TEST_CASE("operators on each element") { check(pointwise_rows()); }
TEST_CASE("reductions, sorting and what runs along a dimension") { check(reduction_rows()); }
TEST_CASE("shapes, views and tensors put together") { check(shape_rows()); }
TEST_CASE("elements by their indices") { check(indexing_rows()); }
TEST_CASE("products and linear algebra") { check(product_rows()); }
TEST_CASE("layers and losses") { check(layer_rows()); }
TEST_CASE("in place, through views, and on lists") { check(in_place_rows()); }
TEST_CASE("the table has at least 250 rows") { CHECK(checked >= 250); }

}  // namespace
}  // namespace tessera::testing

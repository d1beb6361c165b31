#include <set>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tessera/tests/ops/rules/rule_checks.h"
#include "tessera/tests/ops/rules/samples.h"
#include "tessera/tests/ops/rules/simulate.h"

// Runs every strategy of every rule in one process, as the ranks of a mesh would, and compares with the whole tensors.
namespace tessera::testing {
namespace {

Placements column(const Placement& p) { return {p}; }

void check_outputs(const Prepared& sample) {
  const auto& outputs = sample.has_meta() ? sample.call().outputs : sample.rule().outputs;
  if (outputs.empty()) return;
  REQUIRE(outputs.size() == sample.results().size());
  for (std::size_t k = 0; k < outputs.size(); ++k) {
    const at::Tensor& t = sample.results()[k];
    CHECK(outputs[k].defined == t.defined());
    if (!t.defined()) continue;
    CHECK(outputs[k].sizes == t.sizes().vec());
    CHECK_MESSAGE((outputs[k].dtype == t.scalar_type()),
                  fmt::format("result {} is {}", k, c10::toString(t.scalar_type())));
  }
}

// Checks every cut of which a view can be taken without communication.
int check_kept(const Prepared& sample) {
  int count = 0;
  for (int64_t d = 0; sample.rule().outputs_for && d < sample.tensors()[0].dim(); ++d) {
    for (const Placement& cut : {Shard(d), BlockCyclic(d, 1), BlockCyclic(d, 2)}) {
      for (const int64_t n : {2, 3, 4}) {
        std::vector<Placements> inputs(sample.tensors().size(), column(Replicate()));
        inputs[0] = column(cut);
        const std::vector<int64_t> mesh = {n};
        const auto outputs = sample.rule().outputs_for(inputs, mesh);
        if (!outputs) continue;
        const std::string_view kernel = sample.rule().keep_kernel;
        const std::string wrong = simulate(
            sample, {.inputs = inputs, .outputs = *outputs, .kernel = kernel.empty() ? sample.rule().kernel : kernel},
            mesh);
        CHECK_MESSAGE(wrong.empty(), fmt::format("{} -> {}: {}", to_string(cut), to_string((*outputs)[0]), wrong));
        ++count;
      }
    }
  }
  return count;
}

int check_sample(const Sample& sample) {
  CAPTURE(sample.op);
  const Prepared prepared(sample);
  check_outputs(prepared);
  int count = check_kept(prepared);
  const StrategyRuns runs = run_strategies(prepared);
  for (const std::string& wrong : runs.wrong) CHECK_MESSAGE(false, wrong);
  count += runs.count;
  return count;
}

using Names = std::set<std::string, std::less<>>;

// Requires at least one sample for each rule of the table. Operators that cannot be called are listed by name, and so
// are those whose results are not known before they run, which the dispatcher replicates.
void check_table(std::span<const rules::RuleEntry> table, const std::vector<Sample>& samples, const Names& not_called,
                 const Names& replicated) {
  at::manual_seed(1);
  Names seen;
  Names without_result;
  int count = 0;
  for (const Sample& sample : samples) {
    count += check_sample(sample);
    seen.insert(sample.rule.empty() ? rules::rule_key(find_op(sample.op).schema().name()) : sample.rule);
    const Prepared prepared(sample);
    if (!prepared.has_meta() && prepared.rule().outputs.empty()) without_result.insert(sample.op);
  }
  for (const rules::RuleEntry& entry : table) {
    const bool known = seen.contains(entry.name) || not_called.contains(entry.name);
    CHECK_MESSAGE(known, fmt::format("no sample of {}", entry.name));
  }
  MESSAGE(fmt::format("{} strategies run", count));
  for (const std::string& op : without_result) {
    CHECK_MESSAGE(replicated.contains(op), fmt::format("no result without running: {}", op));
  }
}

TEST_CASE("views: every strategy gives the whole's result") {
  check_table(rules::view_rules(), view_samples(), {}, {});
}

TEST_CASE("tensors put together: every strategy gives the whole's result") {
  check_table(rules::join_rules(), join_samples(), {}, {});
}

TEST_CASE("elements by their indices: every strategy gives the whole's result") {
  check_table(rules::indexing_rules(), indexing_samples(), {}, {"aten::index.Tensor"});
}

TEST_CASE("norms: every strategy gives the whole's result") {
  check_table(rules::norm_rules(), norm_samples(), {"_fused_rms_norm_backward"}, {"aten::native_batch_norm"});
}

TEST_CASE("reductions: every strategy gives the whole's result") {
  check_table(rules::reduction_rules(), reduction_samples(), {}, {"aten::median", "aten::nanmedian"});
}

TEST_CASE("products: every strategy gives the whole's result") {
  check_table(rules::matmul_rules(), matmul_samples(), {"_grouped_mm", "_scaled_mm"}, {});
}

TEST_CASE("softmax, embeddings, losses, attention: every strategy gives the whole's result") {
  // LibTorch has these for GPUs alone; tests/dtensor/fused_cells_test.cpp has kernels of them for the CPU.
  const Names cells = {"_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward", "_thnn_fused_lstm_cell",
                       "_thnn_fused_lstm_cell_backward_impl"};
  check_table(rules::nn_rules(), nn_samples(), cells, {});
}

TEST_CASE("convolution: every strategy gives the whole's result") {
  check_table(rules::convolution_rules(), convolution_samples(), {}, {});
}

TEST_CASE("pooling: every strategy gives the whole's result") {
  check_table(rules::pooling_rules(), pooling_samples(), {}, {});
}

TEST_CASE("factories: every strategy gives the whole's sizes and values") {
  check_table(rules::factory_rules(), factory_samples(), {}, {});
}

TEST_CASE("operators on the items of a batch: every strategy gives the whole's result") {
  check_table(rules::batched_rules(), batched_samples(), {}, {"aten::geqrf"});
}

TEST_CASE("random operators: every strategy gives the whole's sizes") {
  std::vector<Sample> samples = random_samples();
  for (const rules::RuleEntry& entry : rules::random_rules()) {
    for (Sample& sample : made_samples(std::string(entry.name))) samples.push_back(std::move(sample));
  }
  check_table(rules::random_rules(), samples, {}, {});
}

TEST_CASE("pointwise operators: every strategy of every overload gives the whole's result") {
  at::manual_seed(2);
  std::vector<Sample> samples = pointwise_samples();
  for (const rules::RuleEntry& entry : rules::pointwise_rules()) {
    for (Sample& sample : made_samples(std::string(entry.name))) samples.push_back(std::move(sample));
  }
  // It returns two results of different dtypes.
  const Names replicated = {"aten::frexp.Tensor"};
  check_table(rules::pointwise_rules(), samples, {}, replicated);
}

}  // namespace
}  // namespace tessera::testing

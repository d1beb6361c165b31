#include "tessera/styles/parallel_styles.h"

#include <stdexcept>

#include <fmt/format.h>

namespace tessera {
namespace {

constexpr const char* kKnown = "torch::nn::Linear and torch::nn::Embedding";

const std::vector<std::string>& linear_operators() {
  static const std::vector<std::string> names = {"matmul", "addmm"};
  return names;
}

const std::vector<std::string>& norm_operators() {
  static const std::vector<std::string> names = {"layer_norm", "rms_norm", "group_norm"};
  return names;
}

std::string describe(const std::string& name, const StyleLayouts& given) {
  std::string text;
  const auto add = [&](const char* what, const std::optional<Placement>& layout) {
    if (layout) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what, to_string(*layout));
  };
  add("input", given.input_layouts);
  add("desired", given.desired_input_layouts);
  add("output", given.output_layouts);
  if (given.use_local_output) text += text.empty() ? "local output" : ", local output";
  return text.empty() ? name : fmt::format("{}({})", name, text);
}

ContractLayouts layouts_of(const StyleLayouts& given, std::vector<std::string> operators, const Placement& input,
                           const Placement& output) {
  const Placement desired = given.desired_input_layouts.value_or(input);
  return {.operators = std::move(operators),
          .input = given.input_layouts.value_or(input),
          .desired = desired,
          .output = given.output_layouts.value_or(output),
          .use_local_output = given.use_local_output};
}

// `output += bias` of a plain output: what this rank holds lies as the matmul's contract left it.
ContractLayouts bias_layouts(const ContractLayouts& weight) {
  const Placement output = weight.output.value_or(Replicate());
  return {.operators = {"add"},
          .input = output,
          .desired = output,
          .output = output,
          .use_local_output = weight.use_local_output};
}

void apply_linear(ApplyContext& context, const Placement& weight, const Placement& bias, const ContractLayouts& layouts) {
  context.place("weight", weight);
  context.contract("weight", layouts);
  if (!context.has("bias")) return;
  context.place("bias", bias);
  if (layouts.use_local_output) context.contract("bias", bias_layouts(layouts));
}

void apply_embedding(ApplyContext& context, const std::string& style, const Placement& weight,
                     const ContractLayouts& layouts) {
  if (context.renormalizes()) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: {} ({}): an Embedding with max_norm rewrites whole rows in forward, which no rank "
                    "has; leave it "
                    "out of the plan, so that it is replicated, or clip its rows after each step",
                    shown_path(context.path()), style));
  }
  context.place("weight", weight);
  context.contract("weight", layouts);
}

}  // namespace

void ColwiseParallel::apply(ApplyContext& context) const {
  if (context.kind() == ModuleKind::kLinear) {
    const ContractLayouts layouts = layouts_of(layouts_, linear_operators(), Replicate(), Shard(-1));
    // An output brought elsewhere than to its features' pieces takes the whole bias, without communication.
    return apply_linear(context, Shard(0), layouts.output == Shard(-1) ? Shard(0) : Replicate(), layouts);
  }
  if (context.kind() == ModuleKind::kEmbedding) {
    return apply_embedding(context, name(), Shard(1), layouts_of(layouts_, {"embedding"}, Replicate(), Shard(-1)));
  }
  context.unknown_module(kKnown);
}

std::string ColwiseParallel::to_string() const { return describe(name(), layouts_); }

void RowwiseParallel::apply(ApplyContext& context) const {
  if (context.kind() == ModuleKind::kLinear) {
    return apply_linear(context, Shard(1), Replicate(), layouts_of(layouts_, linear_operators(), Shard(-1), Replicate()));
  }
  if (context.kind() == ModuleKind::kEmbedding) {
    return apply_embedding(context, name(), Shard(0), layouts_of(layouts_, {"embedding"}, Replicate(), Replicate()));
  }
  context.unknown_module(kKnown);
}

std::string RowwiseParallel::to_string() const { return describe(name(), layouts_); }

void SequenceParallel::apply(ApplyContext& context) const {
  const bool is_matrix = context.kind() != ModuleKind::kOther;
  if (is_matrix || (context.tensors().empty() && context.has_children())) {
    context.unknown_module(
        "norms, modules whose own parameters go to layer_norm, group_norm or rms_norm, and modules without any");
  }
  const Placement sequence = Shard(sequence_dim_);
  for (const NamedTensor& item : context.tensors()) {
    context.place(item.name, Replicate());
    if (!item.is_parameter) continue;
    context.contract(item.name, {.operators = norm_operators(),
                                 .input = sequence,
                                 .desired = sequence,
                                 .output = {},
                                 .use_local_output = options_.use_local_output});
  }
}

std::string SequenceParallel::to_string() const {
  return fmt::format("SequenceParallel(sequence_dim {}{})", sequence_dim_,
                     options_.use_local_output ? ", local output" : "");
}

}  // namespace tessera

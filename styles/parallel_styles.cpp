#include "tessera/styles/parallel_styles.h"

#include <array>
#include <set>
#include <stdexcept>

#include <fmt/format.h>

#include "tessera/placement/tile_layout.h"

namespace tessera {
namespace {

constexpr const char* kKnown = "torch::nn::Linear, torch::nn::Embedding and GPT-2's Conv1D";

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
  if (given.gather_input_again) text += text.empty() ? "input gathered again" : ", input gathered again";
  return text.empty() ? name : fmt::format("{}({})", name, text);
}

ContractLayouts layouts_of(const StyleLayouts& given, std::vector<std::string> operators, const Placement& input,
                           const Placement& output) {
  const Placement desired = given.desired_input_layouts.value_or(input);
  return {.operators = std::move(operators),
          .input = given.input_layouts.value_or(input),
          .desired = desired,
          .output = given.output_layouts.value_or(output),
          .use_local_output = given.use_local_output,
          .gather_input_again = given.gather_input_again};
}

void refuse_gathering_again(const ApplyContext& context, const std::string& style, const StyleLayouts& given) {
  if (!given.gather_input_again) return;
  throw std::invalid_argument(
      fmt::format("parallelize_module: {} ({}): gather_input_again is for ColwiseParallel of a torch::nn::Linear or "
                  "Conv1D, whose input may be gathered; leave it out",
                  shown_path(context.path()), style));
}

// Returns the layouts of `output += bias` with a plain output, which is laid out as the matmul's contract left it.
ContractLayouts bias_layouts(const ContractLayouts& weight) {
  const Placement output = weight.output.value_or(Replicate());
  return {.operators = {"add"},
          .input = output,
          .desired = output,
          .output = output,
          .use_local_output = weight.use_local_output};
}

bool is_linear(const ApplyContext& context) {
  return context.kind() == ModuleKind::kLinear || context.kind() == ModuleKind::kConv1D;
}

// Returns the dimension of a linear layer's weight that holds its output (else input) features.
int64_t features_dim(const ApplyContext& context, bool output) {
  return output == (context.kind() == ModuleKind::kLinear) ? 0 : 1;
}

// `child` is "" for the module itself and "out_proj." for its child.
void apply_linear(ApplyContext& context, const Placement& weight, const Placement& bias, const ContractLayouts& layouts,
                  const std::string& child = "") {
  context.place(child + "weight", weight);
  context.contract(child + "weight", layouts);
  if (!context.has(child + "bias")) return;
  context.place(child + "bias", bias);
  if (layouts.use_local_output) context.contract(child + "bias", bias_layouts(layouts));
}

void apply_embedding(ApplyContext& context, const std::string& style, const Placement& weight,
                     const ContractLayouts& layouts) {
  if (context.renormalizes()) {
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {} ({}): an Embedding with max_norm rewrites whole rows in forward, and no rank has whole "
        "rows or all of them; leave it out of the plan (as convert_parallel_linear does), so that it is replicated, or "
        "clip its rows after each step",
        shown_path(context.path()), style));
  }
  context.place("weight", weight);
  context.contract("weight", layouts);
}

// Returns the placement of `copies` stacked tensors of `features` rows each, such as [q; k; v]: each rank gets its own
// heads' rows of every copy. Heads are split as torch.chunk splits them.
Placement by_heads(int64_t features, int64_t num_heads, int64_t copies, int64_t ranks) {
  const int64_t of_head = features / num_heads;
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < ranks; ++i) {
    const Interval heads = chunk_range(num_heads, ranks, i);
    Intervals mine;
    for (int64_t copy = 0; copy < copies; ++copy) {
      append(mine, {copy * features + heads.begin * of_head, copy * features + heads.end * of_head});
    }
    tiles.push_back({mine});
  }
  return layout_of_tiles(std::array{copies * features}, std::array{ranks}, tiles).value().front();
}

void apply_attention(ApplyContext& context, const std::string& style, const StyleLayouts& given) {
  if (given.input_layouts && !given.input_layouts->is_replicate()) {
    throw std::invalid_argument(fmt::format(
        "parallelize_module: {} ({}): a MultiheadAttention reads the sizes of what it is given, so a plain input must "
        "be the whole, not a piece laid out as {}; give it a DTensor of that layout, and leave input_layouts out",
        shown_path(context.path()), style, to_string(*given.input_layouts)));
  }
  const int64_t ranks = context.mesh().size(context.tensor_dim());
  const Placement heads = by_heads(context.embed_dim(), context.num_heads(), 1, ranks);
  const Placement packed = by_heads(context.embed_dim(), context.num_heads(), 3, ranks);
  const ContractLayouts projection{.operators = linear_operators(),
                                   .input = Replicate(),
                                   .desired = given.desired_input_layouts.value_or(Replicate()),
                                   .output = {}};
  for (const char* name : {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}) {
    if (!context.has(name)) continue;
    context.place(name, std::string(name) == "in_proj_weight" ? packed : heads);
    context.contract(name, projection);
  }
  if (context.has("in_proj_bias")) context.place("in_proj_bias", packed);
  for (const char* name : {"bias_k", "bias_v"}) {
    if (context.has(name)) context.place(name, heads.on(2));
  }
  const StyleLayouts result{.output_layouts = given.output_layouts, .use_local_output = given.use_local_output};
  apply_linear(context, heads.on(1), Replicate(), layouts_of(result, linear_operators(), heads.on(-1), Replicate()),
               "out_proj.");
}

}  // namespace

void ColwiseParallel::apply(ApplyContext& context) const {
  if (is_linear(context)) {
    const ContractLayouts layouts = layouts_of(layouts_, linear_operators(), Replicate(), Shard(-1));
    // Where the output is redistributed to another layout than S(-1), each rank adds the whole bias, without
    // communication.
    const Placement bias = layouts.output == Shard(-1) ? Shard(0) : Replicate();
    return apply_linear(context, Shard(features_dim(context, /*output=*/true)), bias, layouts);
  }
  refuse_gathering_again(context, name(), layouts_);
  if (context.kind() == ModuleKind::kEmbedding) {
    return apply_embedding(context, name(), Shard(1), layouts_of(layouts_, {"embedding"}, Replicate(), Shard(-1)));
  }
  if (context.kind() == ModuleKind::kAttention) return apply_attention(context, name(), layouts_);
  context.unknown_module(std::string("torch::nn::MultiheadAttention, ") + kKnown);
}

std::string ColwiseParallel::to_string() const { return describe(name(), layouts_); }

void RowwiseParallel::apply(ApplyContext& context) const {
  refuse_gathering_again(context, name(), layouts_);
  if (is_linear(context)) {
    return apply_linear(context, Shard(features_dim(context, /*output=*/false)), Replicate(),
                        layouts_of(layouts_, linear_operators(), Shard(-1), Replicate()));
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
                                 .output = sequence,
                                 .use_local_output = options_.use_local_output});
  }
}

std::string SequenceParallel::to_string() const {
  return fmt::format("SequenceParallel(sequence_dim {}{})", sequence_dim_,
                     options_.use_local_output ? ", local output" : "");
}

void PlaceParameters::apply(ApplyContext& context) const {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(
        fmt::format("parallelize_module: {} ({}): {}", shown_path(context.path()), to_string(), what));
  };
  if (placements_.empty()) refuse("it names no parameter; give pairs of a name and a placement, or leave it out");
  std::set<std::string> names;
  for (const auto& [tensor, placement] : placements_) {
    if (!names.insert(tensor).second) refuse(fmt::format("'{}' is named twice; give it one placement", tensor));
    context.place(tensor, placement);
  }
}

std::string PlaceParameters::to_string() const {
  std::string text;
  for (const auto& [tensor, placement] : placements_) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", tensor, tessera::to_string(placement));
  }
  return fmt::format("{}({})", name(), text);
}

}  // namespace tessera

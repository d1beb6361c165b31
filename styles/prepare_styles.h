#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/styles/style.h"

namespace tessera {

// Holds one layout per tensor among forward's arguments (or results), on the tensor dimension; nullopt leaves the
// tensor as it is. On every other mesh dimension the tensor keeps its placement. An undefined tensor stays undefined.
// The list may end with nullopts for arguments that have defaults and were not given.
using Layouts = std::vector<std::optional<Placement>>;

struct PrepareInputOptions {
  Layouts input_layouts = {};          // a plain tensor becomes a DTensor whose piece on this rank it is
  Layouts desired_input_layouts = {};  // each tensor is redistributed to this
  bool use_local_input = false;        // the module receives plain tensors, this rank's pieces
};

struct PrepareOutputOptions {
  Layouts output_layouts = {};          // the layout of a plain result
  Layouts desired_output_layouts = {};  // each result is redistributed to this
  bool use_local_output = false;        // the caller receives plain tensors, this rank's pieces
};

struct PrepareInputOutputOptions {
  PrepareInputOptions input = {};
  PrepareOutputOptions output = {};
};

// Lays out the inputs of a container. The container must be a TESSERA_MODULE (hooks.h): LibTorch's own modules cannot
// be hooked.
//   {"attn", PrepareModuleInput({.input_layouts = {Shard(1), std::nullopt},
//                                .desired_input_layouts = {Replicate(), std::nullopt}})}
// Where the mesh has data dimensions of several ranks, forward refuses a plain tensor, since it does not say which part
// of the batch it is; under InferenceMode it is each rank's own. The pieces of a plain tensor have the same size on
// every rank, since the global size cannot be told from an uneven piece: for uneven ones pass a DTensor, by from_local
// with its shape. Throws std::invalid_argument in the constructor when the two lists differ in length or in which
// entries are nullopt, and in forward, on every rank, when there are more tensors than layouts, or no tensor for a
// layout. Communication: that of the redistribution, in each forward.
class PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareInputOptions options);
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "PrepareModuleInput"; }
  std::string to_string() const override;
  bool joins_others() const override { return true; }

 private:
  PrepareInputOptions options_;
};

// Lays out the outputs of a container, as PrepareModuleInput does its inputs.
class PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareOutputOptions options);
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "PrepareModuleOutput"; }
  std::string to_string() const override;
  bool joins_others() const override { return true; }

 private:
  PrepareOutputOptions options_;
};

// Lays out both inputs and outputs.
class PrepareModuleInputOutput : public ParallelStyle {
 public:
  explicit PrepareModuleInputOutput(PrepareInputOutputOptions options);
  void apply(ApplyContext& context) const override;
  std::string name() const override { return "PrepareModuleInputOutput"; }
  std::string to_string() const override;
  bool joins_others() const override { return true; }

 private:
  PrepareModuleInput input_;
  PrepareModuleOutput output_;
};

}  // namespace tessera

#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/styles/style.h"

namespace tessera {

// One layout for each tensor among forward's arguments (or results), on the tensor dimension; nullopt leaves it as it
// is. Every other mesh dimension keeps its placement. An undefined tensor must be nullopt or stays undefined. A nullopt
// at the end may have no tensor: forward was called without an argument that has a default.
using Layouts = std::vector<std::optional<Placement>>;

struct PrepareInputOptions {
  Layouts input_layouts;          // how a plain tensor lies: it becomes a DTensor of this rank's pieces
  Layouts desired_input_layouts;  // into which it is brought
  bool use_local_input = false;   // the module sees plain tensors, this rank's pieces
};

struct PrepareOutputOptions {
  Layouts output_layouts;          // how a plain result lies
  Layouts desired_output_layouts;  // into which it is brought
  bool use_local_output = false;   // the caller sees plain tensors, this rank's pieces
};

struct PrepareInputOutputOptions {
  PrepareInputOptions input;
  PrepareOutputOptions output;
};

// Lays out what enters a container. The container is a TESSERA_MODULE (hooks.h): LibTorch's own modules cannot be
// hooked.
//   {"attn", PrepareModuleInput({.input_layouts = {Shard(1), std::nullopt}, .desired_input_layouts = {Replicate(),
//   std::nullopt}})}
// A plain tensor under data dimensions is refused at forward: nobody could know which part of the batch it is.
// Throws std::invalid_argument when the two lists differ in length (at once), and when forward is given more tensors,
// or none for a layout (there, on every rank alike).
// Communication: that of the redistribution, at each forward.
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

// The same for what leaves it.
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

// Both.
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

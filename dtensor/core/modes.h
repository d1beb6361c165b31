#pragma once

#include <functional>
#include <set>
#include <string>

namespace tessera {

// While one lives, on its thread, an operator that would communicate on its own throws std::runtime_error that names
// the operator, the tensors' layouts and the collective, before anything is sent. Explicit, and so allowed:
//   redistribute and its kin, full_tensor, distribute_tensor, from_local with check, loading and saving;
//   what gives the program a value: item, equal of tensors that lie alike, one_hot, tensor_split at a tensor's indices,
//   the lengths of
//   packed sequences, a GradScaler's search for infinite numbers;
//   contracts of styles, parameters gathered by data_placement, the reduction of a gradient into its parameter.
class Strict {
 public:
  explicit Strict(bool enabled = true);
  ~Strict();
  Strict(const Strict&) = delete;
  Strict& operator=(const Strict&) = delete;
  static bool enabled();

 private:
  bool previous_;
};

// While one lives, on its thread, an operator that communicates on its own says so in spdlog's default logger, as a
// warning: the operator, the tensors' layouts and the collective, each text once. Nothing is refused; for what counts,
// see CommCounter.
class WarnImplicit {
 public:
  explicit WarnImplicit(bool enabled = true);
  ~WarnImplicit();
  WarnImplicit(const WarnImplicit&) = delete;
  WarnImplicit& operator=(const WarnImplicit&) = delete;
  static bool enabled();
  static void warn(const std::string& text);

 private:
  WarnImplicit* const previous_;
  const bool enabled_;
  std::set<std::string> said_;
};

// While one lives, on its thread, a plain tensor among an operator's DTensors counts as replicated: every rank must
// hold the same values. Without it such a tensor is refused unless it has no dimensions. Beside a parameter whose style
// takes plain tensors for this rank's piece it is a piece, or refused: see dtensor/core/contract.h.
class ImplicitReplication {
 public:
  explicit ImplicitReplication(bool enabled = true);
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;
  static bool enabled();

 private:
  bool previous_;
};

namespace detail {
// Held by the library around communication that the user asked for.
class Explicit {
 public:
  Explicit() : strict_(false), warn_(false) {}

 private:
  Strict strict_;
  WarnImplicit warn_;
};

// Before communication that nobody asked for: throws under Strict, warns under WarnImplicit. `moves` says, only where
// it is asked, what would move: "; Float [4] ... would go to [R] by ...".
void implicit_communication(const std::string& op, const std::function<std::string()>& moves);
}  // namespace detail

}  // namespace tessera

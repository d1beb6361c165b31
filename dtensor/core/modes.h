#pragma once

#include <functional>
#include <set>
#include <string>

namespace tessera {

// While a Strict is alive, an operator that would communicate on its own throws std::runtime_error on this thread,
// before anything is sent. The error names the operator, the tensors' layouts and the collective. `Strict` still
// allows:
//   - redistribute and the functions built on it, full_tensor, distribute_tensor, from_local with check, loading and
//     saving;
//   - operators that return a value to the program: item, equal of two tensors of one layout, one_hot, tensor_split at
//     the indices that a tensor holds, the lengths of packed sequences, a GradScaler's search for non-finite numbers;
//   - what was asked for beforehand: contracts of styles, parameters gathered by data_placement, and the reduction of a
//     gradient into its parameter's layout.
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

// While a WarnImplicit is alive, each operator on this thread that communicates on its own logs a warning (see
// mesh/core/log.h). It names the operator, the tensors' layouts and the collective; each text is logged once. Nothing
// is refused. CommCounter counts the collectives.
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

// While an ImplicitReplication is alive, a plain tensor among an operator's DTensors counts as replicated on this
// thread: every rank must hold the same values. Without it such a tensor is refused unless it has no dimensions. Beside
// a parameter whose style takes plain tensors as pieces, it is a piece, or refused: see dtensor/core/contract.h.
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
// The library holds one while it communicates for a call of the user that asks for communication.
class Explicit {
 public:
  Explicit() : strict_(false), warn_(false) {}

 private:
  Strict strict_;
  WarnImplicit warn_;
};

// Is called before communication that the user did not ask for: throws under Strict, warns under WarnImplicit. `moves`
// is called only where its text is needed; it describes the communication: "; Float [4] ... would go to [R] by ...".
void implicit_communication(const std::string& op, const std::function<std::string()>& moves);
}  // namespace detail

}  // namespace tessera

#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "tessera/dtensor/dispatch/call.h"

namespace tessera::dispatch {

// Brings what a call writes to views that were copied (detail::ViewCopy) to the viewed tensors, by a redistribution
// from the layout in which they were viewed.
class CopiedViewWrites {
 public:
  // Make it before the operator runs. Throws std::invalid_argument where a write cannot be brought to the viewed
  // tensor; where the call also writes that tensor by another way, of which one write would be lost; and where a list
  // operator also reads it, which may be after the write.
  explicit CopiedViewWrites(const Call& call) {
    if (!call.traits.written_args.empty()) find(call);
  }
  // Says how each write is brought back where that communicates.
  std::vector<std::string> ways_back() const;
  // Calls implicit_communication() for them.
  void announce() const;
  // Call it after the operator. `raised_later` says that LibTorch raises the version of what an operator writes after
  // it, where LibTorch has a kernel for that.
  void bring_back(bool raised_later) const {
    if (!copies_.empty()) bring_all_back(raised_later && raises_);
  }

 private:
  void find(const Call& call);
  void refuse_other_uses(const Call& call) const;
  void bring_all_back(bool raised_later) const;

  const std::string* name_ = nullptr;  // of the operator
  bool raises_ = false;                // the operator has a kernel of LibTorch's that raises versions
  c10::SmallVector<at::Tensor, 1> copies_;
};

}  // namespace tessera::dispatch

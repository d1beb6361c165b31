#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include <torch/types.h>

#include <doctest/doctest.h>

#include "tessera/mesh/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/tests/dtensor/io/test_files.h"

namespace tessera {

// Returns the text of the exception of `call`, which must be the same on every rank.
template <typename Call>
std::string same_message(const DeviceMesh& mesh, const Call& call) {
  const std::string text = message_of(call);
  at::Tensor bytes = torch::zeros({2000}, torch::kByte);
  std::copy_n(text.begin(), std::min<std::size_t>(text.size(), 2000), static_cast<char*>(bytes.mutable_data_ptr()));
  const at::Tensor all = all_gather(bytes, mesh, 0);
  for (int64_t rank = 0; rank < all.size(0); ++rank) CHECK(all[rank].equal(bytes));
  return text;
}

}  // namespace tessera

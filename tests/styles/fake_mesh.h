#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tessera/mesh/device_mesh.h"

// Meshes whose collectives move nothing, so that one process sees what a style does to parameters.
namespace tessera::testing {

inline DeviceMesh fake_mesh(int64_t rank, std::vector<int64_t> shape, std::vector<std::string> names = {}) {
  int64_t size = 1;
  for (const int64_t n : shape) size *= n;
  return init_device_mesh("cpu", std::move(shape), std::move(names), World::fake(rank, size));
}

// Calls `body(mesh)` as every rank of a mesh of `shape`; each must throw std::invalid_argument with `text` in its
// message.
template <class Body>
void check_refused_on_every_rank(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                 const std::string& text, const Body& body) {
  int64_t size = 1;
  for (const int64_t n : shape) size *= n;
  for (int64_t rank = 0; rank < size; ++rank) {
    CAPTURE(rank);
    std::string message = "(nothing was thrown)";
    try {
      body(fake_mesh(rank, shape, names));
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    CAPTURE(message);
    CAPTURE(text);
    CHECK(message.find(text) != std::string::npos);
  }
}

}  // namespace tessera::testing

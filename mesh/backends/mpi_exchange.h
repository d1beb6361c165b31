#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/backends/mpi_transport.h"
#include "tessera/mesh/backends/mpi_work.h"

namespace tessera {

// Memory that travels.
struct MpiSpan {
  char* data = nullptr;
  int64_t bytes = 0;
};
using MpiSpans = std::vector<MpiSpan>;  // by rank

// Throws std::invalid_argument: "OP over MPI: TEXT".
[[noreturn]] void refuse_over_mpi(const char* op, const std::string& text);

// The memory of a tensor. Throws std::invalid_argument, naming `op`, when it is not dense and contiguous on the CPU.
MpiSpan mpi_span(const at::Tensor& tensor, const char* op);
// The same of one tensor a rank. Throws std::invalid_argument on another number of them.
MpiSpans mpi_spans(const std::vector<at::Tensor>& tensors, int size, const char* op);

// The same memory for every rank; for one rank alone; cut into pieces of `bytes`; cut into equal pieces.
MpiSpans repeat_span(MpiSpan span, int size);
MpiSpans span_only_at(int rank, MpiSpan span, int size);
MpiSpans cut_span(MpiSpan span, const std::vector<int64_t>& bytes);
MpiSpans cut_span_evenly(MpiSpan span, int size);

// Sends from[i] to rank i, and receives to[i] from it; each pair of ranks agrees on the sizes, 0 sends nothing. All
// ranks are written to at once, the next one first. `transport` lives as long as the work that the stage is given to.
MpiStage exchange_spans(MpiTransport& transport, int tag, MpiSpans from, MpiSpans to);

}  // namespace tessera

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/mesh/backends/mpi_transport.h"
#include "tessera/mesh/backends/mpi_work.h"

namespace tessera {

// Points to memory that is sent or received.
struct MpiSpan {
  char* data = nullptr;
  int64_t bytes = 0;
};
using MpiSpans = std::vector<MpiSpan>;  // one per rank

// Throws std::invalid_argument: "OP over MPI: TEXT".
[[noreturn]] void refuse_over_mpi(const char* op, const std::string& text);

// Returns the memory of a tensor. Throws std::invalid_argument, naming `op`, when the tensor is not dense and
// contiguous on the CPU.
MpiSpan mpi_span(const at::Tensor& tensor, const char* op);
// Does the same for one tensor per rank. Also throws std::invalid_argument unless there are `size` tensors.
MpiSpans mpi_spans(const std::vector<at::Tensor>& tensors, int size, const char* op);

// These make one span per rank: the same span for every rank; `span` for one rank and nothing for the others; `span`
// cut into pieces of `bytes`; `span` cut into equal pieces.
MpiSpans repeat_span(MpiSpan span, int size);
MpiSpans span_only_at(int rank, MpiSpan span, int size);
MpiSpans cut_span(MpiSpan span, const std::vector<int64_t>& bytes);
MpiSpans cut_span_evenly(MpiSpan span, int size);

// Makes a stage that sends from[i] to rank i and receives to[i] from rank i. Each pair of ranks must agree on the
// sizes; a size of 0 sends nothing. All sends start at once, the one to the next rank first. `transport` must live as
// long as the MpiWork that has the stage.
MpiStage exchange_spans(MpiTransport& transport, int tag, MpiSpans from, MpiSpans to);

}  // namespace tessera

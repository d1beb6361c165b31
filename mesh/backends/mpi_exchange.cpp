#include "tessera/mesh/backends/mpi_exchange.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/mesh/core/in_memory.h"

namespace tessera {

void refuse_over_mpi(const char* op, const std::string& text) {
  throw std::invalid_argument(fmt::format("{} over MPI: {}", op, text));
}

MpiSpan mpi_span(const at::Tensor& tensor, const char* op) {
  if (!tensor.defined()) refuse_over_mpi(op, "a tensor is undefined");
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous() ||
      !is_in_memory(tensor)) {
    refuse_over_mpi(
        op, fmt::format("a tensor of shape ({}) and dtype {} on {} is not dense, contiguous memory on the CPU; "
                        "pass contiguous() ones, with resolve_conj() where they are complex",
                        fmt::join(tensor.sizes(), ", "), c10::toString(tensor.scalar_type()), tensor.device().str()));
  }
  return {static_cast<char*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

MpiSpans mpi_spans(const std::vector<at::Tensor>& tensors, int size, const char* op) {
  if (tensors.size() != static_cast<std::size_t>(size)) {
    refuse_over_mpi(op, fmt::format("{} tensors were given for {} ranks; give one per rank", tensors.size(), size));
  }
  MpiSpans spans;
  for (const at::Tensor& tensor : tensors) spans.push_back(mpi_span(tensor, op));
  return spans;
}

MpiSpans repeat_span(MpiSpan span, int size) { return MpiSpans(static_cast<std::size_t>(size), span); }

MpiSpans span_only_at(int rank, MpiSpan span, int size) {
  MpiSpans spans = repeat_span({}, size);
  spans[static_cast<std::size_t>(rank)] = span;
  return spans;
}

MpiSpans cut_span(MpiSpan span, const std::vector<int64_t>& bytes) {
  MpiSpans spans;
  int64_t offset = 0;
  for (const int64_t each : bytes) {
    spans.push_back({span.data + offset, each});
    offset += each;
  }
  return spans;
}

MpiSpans cut_span_evenly(MpiSpan span, int size) {
  return cut_span(span, std::vector<int64_t>(static_cast<std::size_t>(size), span.bytes / size));
}

MpiStage exchange_spans(MpiTransport& transport, int tag, MpiSpans from, MpiSpans to) {
  return [&transport, tag, from = std::move(from), to = std::move(to)](MpiRequests& requests) {
    const int me = transport.rank();
    const int n = transport.size();
    for (int step = 1; step < n; ++step) {
      const int peer = (me + n - step) % n;
      const MpiSpan& span = to[static_cast<std::size_t>(peer)];
      transport.receive(requests, span.data, span.bytes, peer, tag, MpiTransport::Channel::kCollective);
    }
    for (int step = 1; step < n; ++step) {
      const int peer = (me + step) % n;
      const MpiSpan& span = from[static_cast<std::size_t>(peer)];
      transport.send(requests, span.data, span.bytes, peer, tag, MpiTransport::Channel::kCollective);
    }
    const MpiSpan& mine = from[static_cast<std::size_t>(me)];
    const MpiSpan& here = to[static_cast<std::size_t>(me)];
    if (mine.bytes > 0 && mine.data != here.data)
      std::memcpy(here.data, mine.data, static_cast<std::size_t>(mine.bytes));
  };
}

}  // namespace tessera

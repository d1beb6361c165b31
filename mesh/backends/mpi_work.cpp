#include "tessera/mesh/backends/mpi_work.h"

#include <exception>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

namespace tessera {

MpiWork::MpiWork(std::shared_ptr<MpiTransport> transport, std::chrono::milliseconds timeout,
                 std::vector<MpiStage> stages, std::vector<at::Tensor> memory, int source)
    : transport_(std::move(transport)),
      timeout_(timeout),
      stages_(std::move(stages)),
      memory_(std::move(memory)),
      requests_(transport_->begin()),
      source_(source),
      done_(stages_.empty()) {
  if (!done_) guarded([&] { start_stage(); });
}

MpiWork::~MpiWork() {
  try {
    if (!done_ && !exception_) wait(kNoTimeout);
  } catch (const std::exception&) {
    // Nobody will read the error, and abandon() keeps the memory.
  }
}

bool MpiWork::isCompleted() {
  if (exception_) return true;
  try {
    guarded([&] {
      while (!done_ && transport_->test(*requests_)) next_stage();
    });
  } catch (const std::exception&) {
    return true;  // exception() holds the error
  }
  return done_;
}

bool MpiWork::wait(std::chrono::milliseconds timeout) {
  if (exception_) std::rethrow_exception(exception_);
  guarded([&] {
    const auto start = std::chrono::steady_clock::now();
    while (!done_) {
      transport_->wait(*requests_, timeout == kNoTimeout ? timeout_ : timeout, start);
      next_stage();
    }
  });
  return true;
}

// Runs `body`. When it throws, messages may still be in progress and use the memory, so it is abandoned.
template <typename Body>
void MpiWork::guarded(const Body& body) {
  try {
    body();
  } catch (const std::exception&) {
    exception_ = std::current_exception();
    MpiTransport::abandon(std::move(requests_), std::move(memory_));
    throw;
  }
}

void MpiWork::start_stage() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  stages_[stage_](*requests_);
}

void MpiWork::next_stage() {
  if (++stage_ < stages_.size()) return start_stage();
  done_ = true;
  memory_.clear();
}

}  // namespace tessera

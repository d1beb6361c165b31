#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

class FailureBoard;

// Wraps `base` in a store whose waits end early: when `board` shows that the job has failed or that the process of one
// of `ranks` has ended. Without it, making a group waits for the store's whole timeout for a rank that has died. A wait
// then throws std::runtime_error with the failure's text; after the store's timeout, with the keys that are missing.
c10::intrusive_ptr<c10d::Store> watch_store(c10::intrusive_ptr<c10d::Store> base, std::shared_ptr<FailureBoard> board,
                                            std::vector<int64_t> ranks);

}  // namespace tessera

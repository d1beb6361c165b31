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

// A store over `base` whose waits end as soon as `board` knows or finds that the job has failed or that the process of
// one of `ranks` has ended, instead of at the timeout of the store: a group that is being made must not wait minutes
// for a rank that will not come.
// Its waits throw std::runtime_error with the failure's text, or after the store's timeout with the keys that did not
// come.
c10::intrusive_ptr<c10d::Store> watch_store(c10::intrusive_ptr<c10d::Store> base, std::shared_ptr<FailureBoard> board,
                                            std::vector<int64_t> ranks);

}  // namespace tessera

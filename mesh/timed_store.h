#pragma once

#include <chrono>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Wraps `base` in a store each of whose calls ends within `limit`, with a LateError (mesh/core/within.h). c10d's
// TCPStore has no limit for most calls: they wait for ever when the process that serves it is stopped, or its host is
// gone. Each call runs on a thread of its own, which takes some 20 us.
c10::intrusive_ptr<c10d::Store> timed_store(c10::intrusive_ptr<c10d::Store> base, std::chrono::milliseconds limit);

// Returns the store below all c10d::PrefixStores.
const c10d::Store& innermost_store(const c10d::Store& store);
// Says whether no call of `store` but get() and wait() waits for anything: a FolderStore, or a HashStore.
bool never_blocks(const c10d::Store& store);

}  // namespace tessera

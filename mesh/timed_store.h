#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Wraps `base` in a store each of whose calls ends within `limit`, with a LateError (mesh/core/within.h). c10d's
// TCPStore has no limit for most calls: they wait for ever when the process that serves it is stopped, or its host is
// gone. Each call runs on a thread of its own, which takes some 20 us.
c10::intrusive_ptr<c10d::Store> timed_store(c10::intrusive_ptr<c10d::Store> base, std::chrono::milliseconds limit);

// Does what store.check(keys) does; a timed store ends it at `deadline`, if that comes before its limit.
bool check_by(c10d::Store& store, const std::vector<std::string>& keys, std::chrono::steady_clock::time_point deadline);

// Returns the store below all c10d::PrefixStores and signatures (mesh/signed_store.h).
const c10d::Store& innermost_store(const c10d::Store& store);
// Returns " in the folder PATH" where the innermost store is a FolderStore, else "".
std::string place_of(const c10d::Store& store);
// Says whether no call of `store` but get() and wait() waits for anything: a FolderStore, or a HashStore.
bool never_blocks(const c10d::Store& store);

}  // namespace tessera

#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Wraps `base` in a store that writes a random number and HMAC-SHA256(secret, key, number and value) before each value
// (RFC 2104; the library is OpenSSL). get() throws std::runtime_error on a value that does not carry it: somebody
// without the secret wrote it, or a rank of this job has another secret. For compareSet() and add() such a value is as
// if it were not there, so that it can be replaced. What is not protected: that a key is there at all (check, wait),
// reading, and deletion.
//
// compareSet() and add() read, compare and write if nobody has written meanwhile, as often as needed, since the server
// knows no secret.
c10::intrusive_ptr<c10d::Store> signed_store(c10::intrusive_ptr<c10d::Store> base, std::string secret);

// Returns the store that a signed store wraps, and nullptr for another store.
const c10d::Store* base_of_signed(const c10d::Store& store);

}  // namespace tessera

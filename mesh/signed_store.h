#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

// Wraps `base` in a store that writes HMAC-SHA256(secret, key and value) before each value (RFC 2104; the library is
// OpenSSL) and throws std::runtime_error on a value that does not carry it: somebody without the secret wrote it, or a
// rank of this job has another secret. It does not hide values, and cannot prevent that somebody deletes them.
//
// add() reads, and sets the sum if the value is still the same, as often as needed, since the server's own addition
// knows no secret.
c10::intrusive_ptr<c10d::Store> signed_store(c10::intrusive_ptr<c10d::Store> base, std::string secret);

}  // namespace tessera

#include "tessera/mesh/signed_store.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::size_t kTagBytes = 32;

class SignedStore : public c10d::Store {
 public:
  SignedStore(StorePtr base, std::string secret)
      : Store(base->getTimeout()), base_(std::move(base)), secret_(std::move(secret)) {}

  using Store::compareSet;
  using Store::set;

  StorePtr clone() override { return signed_store(base_->clone(), secret_); }
  void set(const std::string& key, const Bytes& value) override { base_->set(key, sign(key, value)); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    // A missing key counts as an empty value, which nobody signs.
    const Bytes before = expected.empty() ? Bytes() : sign(key, expected);
    const Bytes there = base_->compareSet(key, before, sign(key, desired));
    return there == before ? expected : verified(key, there);
  }
  Bytes get(const std::string& key) override { return verified(key, base_->get(key)); }
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override { return base_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return base_->check(keys); }
  int64_t getNumKeys() override { return base_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { base_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    base_->wait(keys, timeout);
  }
  void setTimeout(const std::chrono::milliseconds& timeout) override {
    timeout_ = timeout;
    base_->setTimeout(timeout);
  }

 private:
  Bytes tag_of(const std::string& key, const uint8_t* value, std::size_t size) const;
  Bytes sign(const std::string& key, const Bytes& value) const;
  Bytes verified(const std::string& key, const Bytes& carried) const;

  const StorePtr base_;
  const std::string secret_;
};

Bytes SignedStore::tag_of(const std::string& key, const uint8_t* value, std::size_t size) const {
  // The key's length keeps "ab" of "c" apart from "a" of "bc".
  std::string message = fmt::format("{} {}", key.size(), key);
  message.append(reinterpret_cast<const char*>(value), size);
  Bytes tag(kTagBytes);
  unsigned int length = 0;
  const unsigned char* const made =
      HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(), tag.data(), &length);
  if (made == nullptr || length != kTagBytes) throw std::runtime_error("OpenSSL cannot compute HMAC-SHA256");
  return tag;
}

Bytes SignedStore::sign(const std::string& key, const Bytes& value) const {
  Bytes out = tag_of(key, value.data(), value.size());
  out.insert(out.end(), value.begin(), value.end());
  return out;
}

Bytes SignedStore::verified(const std::string& key, const Bytes& carried) const {
  if (carried.size() >= kTagBytes) {
    const uint8_t* const value = carried.data() + kTagBytes;
    const Bytes tag = tag_of(key, value, carried.size() - kTagBytes);
    if (CRYPTO_memcmp(tag.data(), carried.data(), kTagBytes) == 0) return {value, carried.data() + carried.size()};
  }
  throw std::runtime_error(fmt::format(
      "the store's value of '{}' does not carry this job's secret: somebody else has written it, or a rank has another "
      "secret; give all ranks the same TESSERA_SECRET or TESSERA_SECRET_FILE",
      key));
}

int64_t SignedStore::add(const std::string& key, int64_t value) {
  Bytes before;
  if (base_->check({key})) before = get(key);
  while (true) {
    const int64_t sum = (before.empty() ? 0 : std::stoll(std::string(before.begin(), before.end()))) + value;
    const std::string text = std::to_string(sum);
    const Bytes wanted(text.begin(), text.end());
    const Bytes there = compareSet(key, before, wanted);
    if (there == wanted) return sum;
    before = there;
  }
}

}  // namespace

StorePtr signed_store(StorePtr base, std::string secret) {
  return c10::make_intrusive<SignedStore>(std::move(base), std::move(secret));
}

}  // namespace tessera

#include "tessera/mesh/signed_store.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera {
namespace {

using Bytes = std::vector<uint8_t>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::size_t kTagBytes = 32;
constexpr std::size_t kNumberBytes = 8;  // makes each write of a value different from all others

class SignedStore : public c10d::Store {
 public:
  SignedStore(StorePtr base, std::string secret)
      : Store(base->getTimeout()), base_(std::move(base)), secret_(std::move(secret)) {}

  using Store::compareSet;
  using Store::set;

  const c10d::Store& base() const { return *base_; }
  StorePtr clone() override { return signed_store(base_->clone(), secret_); }
  void set(const std::string& key, const Bytes& value) override { base_->set(key, sign(key, value)); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
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
  using Value = std::optional<Bytes>;

  Bytes tag_of(const std::string& key, const uint8_t* signed_part, std::size_t size) const;
  Bytes sign(const std::string& key, const Bytes& value) const;
  // Returns the value, or nullopt if it does not carry the secret.
  Value value_in(const std::string& key, const Bytes& carried) const;
  // Writes what `value_of` returns for the value that is there, unless that is nullopt. Returns the value that was
  // there.
  Value update(const std::string& key, const std::function<Value(const Value&)>& value_of);

  const StorePtr base_;
  const std::string secret_;
};

Bytes SignedStore::tag_of(const std::string& key, const uint8_t* signed_part, std::size_t size) const {
  // The key's length keeps "ab" of "c" apart from "a" of "bc".
  std::string message = fmt::format("{} {}", key.size(), key);
  message.append(reinterpret_cast<const char*>(signed_part), size);
  Bytes tag(kTagBytes);
  unsigned int length = 0;
  const unsigned char* const made =
      HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(), tag.data(), &length);
  if (made == nullptr || length != kTagBytes) throw std::runtime_error("OpenSSL cannot compute HMAC-SHA256");
  return tag;
}

Bytes SignedStore::sign(const std::string& key, const Bytes& value) const {
  Bytes body(kNumberBytes);
  if (RAND_bytes(body.data(), static_cast<int>(kNumberBytes)) != 1) {
    throw std::runtime_error("OpenSSL has no random number");
  }
  body.insert(body.end(), value.begin(), value.end());
  Bytes out = tag_of(key, body.data(), body.size());
  out.insert(out.end(), body.begin(), body.end());
  return out;
}

SignedStore::Value SignedStore::value_in(const std::string& key, const Bytes& carried) const {
  if (carried.size() < kTagBytes + kNumberBytes) return std::nullopt;
  const uint8_t* const body = carried.data() + kTagBytes;
  const Bytes tag = tag_of(key, body, carried.size() - kTagBytes);
  if (CRYPTO_memcmp(tag.data(), carried.data(), kTagBytes) != 0) return std::nullopt;
  return Bytes(body + kNumberBytes, carried.data() + carried.size());
}

Bytes SignedStore::get(const std::string& key) {
  if (Value value = value_in(key, base_->get(key))) return *std::move(value);
  throw std::runtime_error(fmt::format(
      "the store's value of '{}' does not carry this job's secret: somebody else has written it, or a rank has another "
      "secret; give all ranks the same TESSERA_SECRET or TESSERA_SECRET_FILE",
      key));
}

SignedStore::Value SignedStore::update(const std::string& key, const std::function<Value(const Value&)>& value_of) {
  while (true) {
    const Bytes before = base_->check({key}) ? base_->get(key) : Bytes();
    Value there = value_in(key, before);
    const Value wanted = value_of(there);
    if (!wanted) return there;
    const Bytes carried = sign(key, *wanted);
    if (base_->compareSet(key, before, carried) == carried) return there;
  }
}

Bytes SignedStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  bool sets = false;
  const Value there = update(key, [&](const Value& now) {
    sets = now ? *now == expected : expected.empty();
    return sets ? Value(desired) : Value();
  });
  return sets ? desired : there.value_or(expected);
}

int64_t SignedStore::add(const std::string& key, int64_t value) {
  int64_t sum = 0;
  update(key, [&](const Value& now) {
    sum = (now && !now->empty() ? std::stoll(std::string(now->begin(), now->end())) : 0) + value;
    const std::string text = std::to_string(sum);
    return Value(Bytes(text.begin(), text.end()));
  });
  return sum;
}

}  // namespace

const c10d::Store* base_of_signed(const c10d::Store& store) {
  const auto* const its = dynamic_cast<const SignedStore*>(&store);
  return its == nullptr ? nullptr : &its->base();
}

StorePtr signed_store(StorePtr base, std::string secret) {
  return c10::make_intrusive<SignedStore>(std::move(base), std::move(secret));
}

}  // namespace tessera

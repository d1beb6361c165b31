#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <typeinfo>
#include <utility>

namespace tessera {

// This is the base of Partition and Reduction. Two values of one class are equal exactly when their texts are equal.
class Described {
 public:
  explicit Described(std::string text) : text_(std::move(text)), hash_(std::hash<std::string>()(text_)) {}
  Described(const Described&) = delete;
  Described& operator=(const Described&) = delete;
  virtual ~Described() = default;

  const std::string& text() const { return text_; }
  std::size_t hash() const { return hash_; }

  friend bool operator==(const Described& a, const Described& b) {
    return &a == &b || (a.hash_ == b.hash_ && typeid(a) == typeid(b) && a.text_ == b.text_);
  }

 private:
  const std::string text_;
  const std::size_t hash_;
};

}  // namespace tessera

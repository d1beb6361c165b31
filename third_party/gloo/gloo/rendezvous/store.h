#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

// Only the names that c10d's GlooStore overrides: the order and number of virtual functions in Gloo's own class differ.
// A vtable made from this one would replace LibTorch's and crash, so the constructor is declared and defined nowhere:
// code that would emit one does not link.
class Store {
 public:
  Store();
  virtual ~Store();
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};

}  // namespace gloo::rendezvous

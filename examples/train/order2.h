#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace train {

// Predicts a byte from the two before it, by how often it followed them in a text. It is what a trained model is
// compared with. Where the two bytes were followed by n bytes, d of them different, the model of one byte before has
// the weight d / (n + d), and that of none has it in turn below: Witten, Bell, "The zero-frequency problem" (1991),
// method C.
class Order2Model {
 public:
  explicit Order2Model(std::string_view training);

  // Returns the mean bits that the model takes for each byte of `text` but the first.
  double bits_per_byte(std::string_view text) const;

 private:
  // Counts of the bytes that followed, and how many of them differ.
  struct Counts {
    std::array<uint32_t, 256> of_byte{};
    uint64_t total = 0;
    uint32_t different = 0;

    void add(unsigned char byte);
    double probability(unsigned char byte, double otherwise) const;
  };

  Counts none_;
  std::vector<Counts> one_;  // by the byte before
  std::vector<Counts> two_;  // by the two bytes before
};

}  // namespace train

#include "tessera/examples/train/order2.h"

#include <cmath>
#include <cstddef>

namespace train {
namespace {

unsigned char byte_at(std::string_view text, std::size_t i) { return static_cast<unsigned char>(text[i]); }

std::size_t two_before(std::string_view text, std::size_t i) {
  return std::size_t{byte_at(text, i - 2)} * 256 + byte_at(text, i - 1);
}

}  // namespace

void Order2Model::Counts::add(unsigned char byte) {
  if (of_byte[byte]++ == 0) ++different;
  ++total;
}

double Order2Model::Counts::probability(unsigned char byte, double otherwise) const {
  if (total == 0) return otherwise;
  const double unseen = different;
  return (of_byte[byte] + unseen * otherwise) / (static_cast<double>(total) + unseen);
}

Order2Model::Order2Model(std::string_view training) : one_(256), two_(256 * 256) {
  for (std::size_t i = 0; i < training.size(); ++i) {
    none_.add(byte_at(training, i));
    if (i >= 1) one_[byte_at(training, i - 1)].add(byte_at(training, i));
    if (i >= 2) two_[two_before(training, i)].add(byte_at(training, i));
  }
}

double Order2Model::bits_per_byte(std::string_view text) const {
  double bits = 0;
  for (std::size_t i = 1; i < text.size(); ++i) {
    const unsigned char byte = byte_at(text, i);
    double p = one_[byte_at(text, i - 1)].probability(byte, none_.probability(byte, 1.0 / 256));
    if (i >= 2) p = two_[two_before(text, i)].probability(byte, p);
    bits -= std::log2(p);
  }
  return bits / static_cast<double>(text.size() - 1);
}

}  // namespace train

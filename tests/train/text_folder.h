#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace tessera::testing {

// Writes `files` files of about 3,000 bytes of words into a folder: enough text for a small model to learn from.
inline void write_text_folder(const std::string& folder, int files, uint64_t seed = 1) {
  const std::vector<std::string> words = {"mesh",  "rank", "shard",   "of",     "the",   "a",   "tensor",   "moves",
                                          "holds", "each", "reduces", "pieces", "whole", "sum", "gradient", "step"};
  std::filesystem::create_directories(folder);
  std::mt19937_64 generator(seed);
  for (int i = 0; i < files; ++i) {
    std::ofstream file(folder + "/file" + std::to_string(i) + ".txt");
    for (int line = 0; line < 60; ++line) {
      // Lines differ in their numbers of words and in their signs, so that no file repeats another one.
      const uint64_t count = 3 + generator() % 9;
      for (uint64_t j = 0; j < count; ++j) {
        file << words[generator() % words.size()] << std::string(1, " ,;:-+*/"[generator() % 8]);
      }
      file << '\n';
    }
  }
}

}  // namespace tessera::testing

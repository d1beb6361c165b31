#pragma once

#include <cstdint>
#include <optional>

struct Sampling {
  double temperature = 0;  // 0 takes the likeliest token; logits are divided by any other
  int64_t top_k = 0;       // only the likeliest `top_k` tokens are drawn; 0: all
};

struct GenerateOptions {
  int64_t tokens = 256;         // the most
  std::optional<int64_t> stop;  // generation ends before this token
  Sampling sampling;
};

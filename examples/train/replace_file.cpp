#include "tessera/examples/train/replace_file.h"

#include <cstdint>

#include "tessera/dtensor/io/atomic_file.h"

namespace train {

void replace_file(const std::string& path, const std::string& text) {
  tessera::AtomicFile file(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.sync();
  file.publish();
}

}  // namespace train

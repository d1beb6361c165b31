#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

namespace tessera {

// Leaves this process `count` file descriptors, no more, for as long as it lives.
class FewDescriptors {
 public:
  explicit FewDescriptors(int count) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    std::vector<int> opened;  // the lowest that are free
    for (int i = 0; i <= count; ++i) opened.push_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    for (const int fd : opened) ::close(fd);
    const rlimit few = {.rlim_cur = static_cast<rlim_t>(opened.back()), .rlim_max = before_.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_ = {};
};

}  // namespace tessera

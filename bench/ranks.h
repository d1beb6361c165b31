#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::bench {

// Processes, one a rank, that do what this one tells them: a line goes to all, and all answer with a line. They listen
// at a socket, which is no file but a name, so that neither who starts them nor MPI matters, and use no processor while
// they wait.
class Ranks {
 public:
  // Starts `command` SOCKET, which starts `size` ranks, and waits for them. Throws std::runtime_error when it ends
  // before.
  Ranks(const std::string& name, std::vector<std::string> command, int64_t size);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // The answers by rank. Throws std::runtime_error when a rank has ended, or answers "error TEXT".
  std::vector<std::string> ask(const std::string& line);

 private:
  struct Line {
    int file = -1;
    std::string pending;
  };
  void accept_all(int64_t size);

  const std::string name_;
  int listening_ = -1;
  int pid_ = -1;
  std::vector<Line> ranks_;
};

// One of them.
class RankLine {
 public:
  RankLine(const std::string& socket, int64_t rank);
  ~RankLine();
  RankLine(const RankLine&) = delete;
  RankLine& operator=(const RankLine&) = delete;

  // The next line without its end; false when there are no more.
  bool next(std::string& line);
  void answer(const std::string& text);

 private:
  int file_ = -1;
  std::string pending_;
};

}  // namespace tessera::bench

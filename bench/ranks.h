#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::bench {

// Starts processes, one per rank, that execute this one's commands: it sends a line to all, and each answers with a
// line. They connect to a socket with an abstract name, so it does not matter who starts them or whether MPI is used,
// and they use no processor while they wait.
class Ranks {
 public:
  // Runs `command` SOCKET, which starts `size` ranks, and waits until they connect. Throws std::runtime_error when it
  // ends before that.
  Ranks(const std::string& name, std::vector<std::string> command, int64_t size);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Sends `line` to all ranks and returns their answers, by rank. Throws std::runtime_error when a rank has ended, or
  // answers "error TEXT".
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

// Connects one rank to the process that commands it.
class RankLine {
 public:
  RankLine(const std::string& socket, int64_t rank);
  ~RankLine();
  RankLine(const RankLine&) = delete;
  RankLine& operator=(const RankLine&) = delete;

  // Reads the next line, without its newline. Returns false when there are no more.
  bool next(std::string& line);
  void answer(const std::string& text);

 private:
  int file_ = -1;
  std::string pending_;
};

}  // namespace tessera::bench

#pragma once

namespace tessera {

// A backend has this base too if its collectives may be at work after the caller's wait for them, so that its
// destructor would break them off. A World calls drain() and then end() of its groups when it ends, and of a group when
// another one takes its place, if nobody has failed.
class OrderlyEnd {
 public:
  virtual ~OrderlyEnd() = default;

  // Blocks until this rank's part of all collectives is done. The World's close() of the group may be called meanwhile,
  // and ends the wait. May throw.
  virtual void drain() = 0;
  // Ends the group. Nothing is left to do then, and close() is not called meanwhile. May throw.
  virtual void end() = 0;
};

}  // namespace tessera

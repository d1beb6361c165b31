#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/mesh/backends/cpu_backend.h"
#include "tessera/mesh/group_options.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

struct BackendGroup;
struct CheckState;
struct GroupRequest;

// Seed and counter from which random operators draw; see dtensor/random.h.
struct RandomState {
  uint64_t seed = 0;
  uint64_t counter = 0;
};

// One collective as CommCounter and the error texts see it.
struct CollectiveRecord {
  const char* kind =
      "";  // "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "scatter", "barrier"
  std::string mesh_dim;  // its name, or its index as text
  int64_t bytes = 0;     // bytes of this rank's contribution (the input buffer)
  std::string op;        // the operator that caused it, e.g. "aten::mm" or "redistribute"
  std::string path;      // the parameter or hooked module that took part, else "-"
};

struct WorldOptions {
  // Defined apart, so that who passes no store needs no c10d header.
  WorldOptions();
  WorldOptions(const WorldOptions&);
  WorldOptions(WorldOptions&&) noexcept;
  WorldOptions& operator=(const WorldOptions&);
  WorldOptions& operator=(WorldOptions&&) noexcept;
  ~WorldOptions();

  int64_t rank = 0;
  int64_t size = 1;
  int64_t local_rank = 0;
  int64_t local_size = 1;
  c10::intrusive_ptr<c10d::Store> store;                        // needed when size > 1
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // for everything that waits
  CpuBackend cpu_backend = CpuBackend::kGloo;                   // kMpi: every rank a process of one MPI job
  bool fake = false;                                            // a fake group: plans at any size, moves nothing
  bool checked = false;  // as if a Checked lived from the start; see mesh/collectives/checked.h
  // Makes the process groups in the place of Gloo and NCCL; see mesh/backends/backend_group.h.
  std::function<BackendGroup(const GroupRequest&)> make_group;
  // Where the launcher notes a rank that it saw die, and with ".RANK" one that ended well; may be empty.
  std::string lost_file;
};

// This process's place in the job: my rank, the store, the process groups (made on demand), the timeout, the random
// state, and what is known of failures. Everything that communicates holds one; nothing else knows the rank.
//
// Groups are made at first use by their members alone. One thread at a time may communicate; a second gets an error.
class World : public std::enable_shared_from_this<World> {
 public:
  // The world that the environment describes (explicit TESSERA_* variables, torchrun, Open MPI, MPICH, Slurm; a process
  // started by none is a world of one). One per process: later calls give the same World while anyone holds it. CPU
  // tensors travel by what TESSERA_BACKEND says, else by MPI where the mpirun of the MPI that this build has started
  // the process, else by Gloo.
  // Throws std::invalid_argument when sets of variables disagree, listing what was seen, or ask for what this build has
  // not.
  static std::shared_ptr<World> from_environment();
  // An explicit world. Keys in the store begin with "tessera/": two worlds need two stores, or two c10d::PrefixStores.
  // Over MPI it is collective: all ranks of the world start MPI together.
  // Throws std::invalid_argument on a rank outside [0, size) or a missing store, std::runtime_error when MPI does not
  // start.
  static std::shared_ptr<World> create(WorldOptions options);
  // A world of any size in one process whose collectives move nothing: for plans and for tests of counts.
  static std::shared_ptr<World> fake(int64_t rank, int64_t size);

  ~World();

  // A number of this World alone, never reused in this process.
  uint64_t id() const;
  int64_t rank() const;
  int64_t size() const;
  int64_t local_rank() const;
  int64_t local_size() const;
  // Rank 0's local_size, so the same on every rank, also where hosts differ. Read once from the store, where rank 0
  // wrote it as its world began: waits for that, at most timeout(). Throws std::runtime_error when it does not come.
  int64_t ranks_per_host() const;
  bool is_fake() const;
  CpuBackend cpu_backend() const;
  std::chrono::milliseconds timeout() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // The group of `ranks` (this rank among them) for tensors on `device`: cpu_backend() for CPU, NCCL for CUDA.
  // Collective over `ranks` at first use; groups of other options are other groups. Throws std::invalid_argument when
  // this rank is not among `ranks` or one is outside the world, and as normalized(); std::runtime_error when the device
  // or its backend is not there, or the world has failed.
  c10::intrusive_ptr<c10d::Backend> group(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                          const GroupOptions& options = {});
  // `options` without what groups for `device` have anyhow in this world, so that equal groups have equal options.
  // Throws std::invalid_argument on a backend that is not there, listing those that are, and a timeout that is not
  // positive.
  GroupOptions normalized(const GroupOptions& options, c10::DeviceType device) const;
  // From now on `backend`, which the caller made, is the group of `ranks` for tensors on `device`, in the place of one
  // that the world made. Every member of `ranks` calls it, between the same collectives. No communication. Throws
  // std::invalid_argument when this rank is not among `ranks` or its place and their number are not the group's.
  void adopt(const std::vector<int64_t>& ranks, c10::DeviceType device, c10::intrusive_ptr<c10d::Backend> backend);
  // How often: what group() gave before the last one may have been replaced. Asked within an Exclusive.
  uint64_t adoptions() const;
  // How many groups this rank holds: made by group(), or adopted.
  std::size_t group_count() const;
  // This rank communicates no more: the thread that watches over its groups ends, though something may hold the World
  // on.
  void end_watch();

  RandomState& random_state();

  // ---- failures -------------------------------------------------------------------------------------------------
  // An error that this rank alone may have seen: writes rank, `where` and `text` to the store (first writer wins) and
  // closes every group, so that other ranks' current or next collective throws this text within 5 seconds. Never
  // throws. A fake world and a world of one have nobody to tell: there it does nothing.
  void fail(const std::string& where, const std::string& text) noexcept;
  // Throws std::runtime_error with the recorded failure if this world has failed, else does nothing. Local, cheap.
  void check_alive() const;
  // Turns an exception of a collective into the job's own error: the failure that another rank wrote to the store, else
  // a message that names `where`, the group's ranks, that a peer was lost, and the library's own text. A WaitError
  // (mesh/backends/backend_group.h) tells which of `ranks` may be lost; others may have left because they had done
  // their part.
  [[noreturn]] void rethrow_collective_failure(const std::string& where, const std::vector<int64_t>& ranks,
                                               const std::exception& error);
  // Runs a user's callback; an exception in it is failed() with `where`, then thrown on.
  void guard(const std::string& where, const std::function<void()>& callback);

  // ---- what is being counted ------------------------------------------------------------------------------------
  // Calls `sink` for every collective until the returned token dies.
  using Sink = std::function<void(const CollectiveRecord&)>;
  std::shared_ptr<void> observe(Sink sink);
  void record(const CollectiveRecord& record);
  bool observed() const;

  // For mesh/collectives/checked.h.
  CheckState& check_state();

  // The operator and path that the next collectives of this thread are charged to, while it lives; nullptr leaves what
  // there is. Set by dispatch and by styles. Destroyed by the thread that made it, before those that the thread made
  // earlier.
  struct Scope {
    Scope(World& world, const char* op, const std::string* path = nullptr);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class World;
    // The thread's innermost of `world`; nullptr where there is none.
    static const Scope* of(const World& world);

    World& world_;
    const Scope* const outer_;  // of this thread, of any world
    const char* const op_;
    const std::string* const path_;
  };
  const char* current_op() const;
  const std::string& current_path() const;

  // Held around one collective: throws std::runtime_error when another thread is inside one.
  struct Exclusive {
    explicit Exclusive(World& world);
    ~Exclusive();
    Exclusive(const Exclusive&) = delete;
    Exclusive& operator=(const Exclusive&) = delete;

   private:
    World& world_;
  };

 private:
  explicit World(WorldOptions options);
  void start();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

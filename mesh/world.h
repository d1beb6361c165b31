#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
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
class Recorder;

// Holds the seed and the counter from which random operators draw; see dtensor/random.h.
struct RandomState {
  uint64_t seed = 0;
  uint64_t counter = 0;
  const uint64_t* base = nullptr;  // on a GPU: what is added to the counter there; see CapturedDraws
};

// Describes one collective for CommCounter and other observers.
struct CollectiveRecord {
  const char* kind =
      "";  // "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "scatter", "barrier"
  std::string mesh_dim;  // the mesh dimension's name, or its index as text
  int64_t bytes = 0;     // size of this rank's input in bytes
  std::string op;        // the operator that caused it, e.g. "aten::mm" or "redistribute"
  std::string path;      // the parameter or hooked module that took part, else "-"
};

struct WorldOptions {
  // These are defined in a source, so that callers who pass no store need no c10d header.
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
  std::optional<int> device_index;        // this rank's CUDA device; without one it is chosen as World::device() says
  c10::intrusive_ptr<c10d::Store> store;  // needed when size > 1
  bool agent_serves_store = false;        // another process than rank 0 serves the TCPStore, as torchrun's agent does
  std::chrono::milliseconds timeout = std::chrono::minutes(5);  // limit of each wait for other ranks
  CpuBackend cpu_backend = CpuBackend::kGloo;                   // kMpi: the ranks are the processes of one MPI job
  bool gloo_for_cuda = false;                                   // CUDA tensors go over Gloo, by the host's memory
  bool fake = false;                                            // collectives move nothing: plans for any world size
  bool checked = false;                   // checks every collective; see mesh/collectives/checked.h
  std::size_t recorder_capacity = 16384;  // records that recorder() keeps, 80 bytes each; 0: it is off
  // Is where this rank writes what recorder() holds when the job fails; empty: nowhere. A relative path starts from the
  // folder that is current when the world is made.
  std::string records_folder;
  // When set, makes the process groups instead of cpu_backend and NCCL; see mesh/backends/backend_group.h.
  std::function<BackendGroup(const GroupRequest&)> make_group;
  std::function<void()> on_retire;  // when set, World::retire() calls it
  // The launcher notes in this file a rank that it saw die, and in this path with ".RANK" a rank that ended without an
  // error. May be empty.
  std::string lost_file;
};

// Holds this process's place in the job: its rank, the store, the process groups, the timeout, the random state, and
// the failure of the job if there is one, and the records of what it did. Everything that communicates holds a World;
// nothing else knows the rank.
//
// Invariants:
//   - A group is made at its first use, by its members only.
//   - One thread at a time communicates (Exclusive); a second one gets an error, which fails the job.
//   - A world that has failed stays failed: every later collective throws the failure.
class World : public std::enable_shared_from_this<World> {
 public:
  // Returns the world that the environment describes: explicit TESSERA_* variables, torchrun, Open MPI, MPICH or Slurm;
  // a process that none of these started is a world of one rank. There is one per process: later calls return the same
  // World while anyone holds it. When nobody does, it ends, and a later call begins a new one, which every rank must do
  // alike: hold the World or a mesh as long as the program communicates, since tensors and caches may hold it too. CPU
  // tensors use the backend named by TESSERA_BACKEND. If it is not set, they use MPI where the mpirun of this build's
  // MPI has started the process, else Gloo. CUDA tensors use NCCL, or Gloo where TESSERA_CUDA_BACKEND=gloo, which
  // several processes on one GPU need. Throws std::invalid_argument when sets of variables disagree, listing the
  // variables seen, and when they ask for a backend that this build does not have.
  static std::shared_ptr<World> from_environment();
  // Makes a world from explicit options. Its keys in the store begin with "tessera/", so two worlds need two stores, or
  // two c10d::PrefixStores. Over MPI this call is collective: all ranks of the world start MPI together. Throws
  // std::invalid_argument on a rank outside [0, size), a local rank or local size that does not fit, a missing store,
  // and a timeout that is not positive; std::runtime_error when another process has joined as the same rank, when the
  // ranks that have joined are of a world of another size or with other settings (backends, checked), and when
  // MPI does not start.
  static std::shared_ptr<World> create(WorldOptions options);
  // Makes a world of any size in one process, whose collectives move nothing: for making plans and for tests that count
  // collectives.
  static std::shared_ptr<World> fake(int64_t rank, int64_t size);

  ~World();

  // Returns a number that no other World of this process has, not even a later one.
  uint64_t id() const;
  int64_t rank() const;
  int64_t size() const;
  int64_t local_rank() const;
  int64_t local_size() const;
  // Returns rank 0's local_size, which is the same number on every rank, even if hosts differ. Rank 0 writes it to the
  // store when its world is made. The first call reads it, waiting at most timeout(); throws std::runtime_error when it
  // is not there by then.
  int64_t ranks_per_host() const;
  // Returns the device of this rank's tensors: the CPU, or a CUDA device, which is the one that WorldOptions gave, or
  // the only one that the process sees, or the one with the number of its local rank; cuda:0 in a fake world. Throws
  // std::runtime_error when there is none or when there are too few.
  c10::Device device(c10::DeviceType type) const;
  bool is_fake() const;
  CpuBackend cpu_backend() const;
  std::chrono::milliseconds timeout() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // Returns the group of `ranks`, which must include this rank, for tensors on `device`: over cpu_backend() for CPU,
  // NCCL or Gloo for CUDA. The first call makes the group, collectively over `ranks`; other options make another group.
  // Throws std::invalid_argument when this rank is not among `ranks`, when one of them is outside the world or listed
  // twice, and like normalized(); std::runtime_error when the device or its backend is not available, or the world has
  // failed.
  c10::intrusive_ptr<c10d::Backend> group(const std::vector<int64_t>& ranks, c10::DeviceType device,
                                          const GroupOptions& options = {});
  // Returns `options` without those that equal this world's defaults for `device`, so that equal groups have equal
  // options. Throws std::invalid_argument on a backend that is not available, listing the available ones, and on a
  // timeout that is not positive.
  GroupOptions normalized(const GroupOptions& options, c10::DeviceType device) const;
  // Makes `backend`, which the caller has created, the group of `ranks` for tensors on `device` from now on, in place
  // of the world's own. Every member of `ranks` must call this between the same two collectives. Does not communicate.
  // Throws std::invalid_argument where group() does for `ranks`, on a null backend, and when this rank's position in
  // them and their number differ from the backend's.
  void adopt(const std::vector<int64_t>& ranks, c10::DeviceType device, c10::intrusive_ptr<c10d::Backend> backend);
  // Returns how often adopt() has been called. A group that group() returned at a lower count may have been replaced.
  // Call it within an Exclusive.
  uint64_t adoptions() const;
  // Returns how many groups this rank holds, made by group() or adopted.
  std::size_t group_count() const;
  // Says that this rank will not communicate again, though something may still hold its World, as run_in_process does
  // for each rank: a rank that is a thread leaves its groups, the thread that watches them ends, and caches may drop
  // what they keep for it.
  void retire();
  bool is_retired() const;

  RandomState& random_state();
  // Returns the number of AccumulateGradients (dtensor/gradient_buckets.h) that are alive.
  int& gradient_accumulations();

  // ---- failures -------------------------------------------------------------------------------------------------
  // Fails the job with an error that only this rank may have seen: writes rank, `where` and `text` to the store (the
  // first writer wins) and closes every group, so that the current or next collective of every other rank throws this
  // text within 5 seconds. Never throws. Does nothing in a fake world and in a world of one rank.
  void fail(const std::string& where, const std::string& text) noexcept;
  // Throws std::runtime_error with the recorded failure if this world has failed. A group that its backend has aborted
  // by itself, as LibTorch's watchdog aborts NCCL's, fails the job here. It is cheap, and does not communicate before
  // that.
  void check_alive() const;
  // Says whether the job has failed, or the process of one of `ranks` (global) has ended. Reads the store, /proc and
  // the launcher's file, and takes up to milliseconds; false in a world of one rank and in a fake one.
  bool has_lost(const std::vector<int64_t>& ranks) const;
  // Writes what the recorder holds, as when the job fails: every rank of a group has thrown a MismatchError.
  void note_mismatch(const std::string& text) const noexcept;
  // Turns an exception of a collective into the job's error and throws it as std::runtime_error: the failure that
  // another rank wrote to the store, else a text that names `where`, the group's ranks, the timeout or the loss of a
  // peer, and the library's own text. Of a WaitError (mesh/backends/backend_group.h) only the awaited ranks may be
  // lost; the others may have ended because they had finished their part.
  [[noreturn]] void rethrow_collective_failure(const std::string& where, const std::vector<int64_t>& ranks,
                                               const std::exception& error) const;
  // Runs code that may throw on this rank alone; an exception in it fails the job: fail(where, ...) is called, and the
  // exception is thrown on. A MismatchError, which every rank of the group throws, is only thrown on.
  void guard(const std::string& where, const std::function<void()>& callback);

  // ---- observers ------------------------------------------------------------------------------------------------
  // Calls `sink` for every collective until the returned token is destroyed. An exception in it fails the job.
  using Sink = std::function<void(const CollectiveRecord&)>;
  std::shared_ptr<void> observe(Sink sink);
  void record(const CollectiveRecord& record);
  bool observed() const;
  // Keeps the last operators and collectives of this rank; see mesh/recorder.h.
  Recorder& recorder() const { return *recorder_; }

  // Returns the state of mesh/collectives/checked.h.
  CheckState& check_state();

  // While it lives, collectives of this thread are recorded under this operator and path; nullptr keeps the current
  // one. Dispatch and styles set it. The thread that made a Scope must destroy it, before the Scopes that it made
  // earlier.
  struct Scope {
    Scope(World& world, const char* op, const std::string* path = nullptr);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class World;
    // Returns this thread's innermost Scope for `world`, or nullptr.
    static const Scope* of(const World& world);

    World& world_;
    const Scope* const outer_;  // this thread's Scope before this one, for any world
    const char* const op_;
    const std::string* const path_;
  };
  const char* current_op() const;
  const std::string& current_path() const;

  // An Exclusive is held around one collective. Its constructor fails the job and throws std::runtime_error when
  // another thread holds one. In a process that was forked after the world had been made it throws std::runtime_error;
  // the job goes on.
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
  // Writes what the recorder holds to WorldOptions::records_folder, the first time that it is called.
  void keep_records(const std::string& failure) const noexcept;
  struct Impl;
  std::unique_ptr<Recorder> recorder_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

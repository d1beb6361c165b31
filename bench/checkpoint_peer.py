"""Saves and loads with torch.distributed.checkpoint; checkpoint.cpp sends the commands over a socket.

    case LAYOUT MEGABYTES   ->   BYTES of the state, over the ranks
    save FOLDER             ->   microseconds of dcp.save
    load FOLDER             ->   microseconds of dcp.load
    start FOLDER            ->   microseconds until dcp.async_save returns
    wait -                  ->   microseconds until it has ended
    steps N                 ->   microseconds of N steps of the optimizer
    digest -                ->   a number that follows from all values
    spoil -                 ->   microseconds of setting all values to 0
"""

import os
import shutil
import time

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # no message that there is no GPU

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import peer_rank

SIDE = 1024


def placement(layout, i):
    return {"dp": Replicate(), "zero": Shard(0), "tp": Shard(i % 2)}[layout]


class Case:
    """Holds what StateCase of checkpoint_rank.cpp holds."""

    def __init__(self, text):
        layout, megabytes = text.split()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        count = max(1, int(megabytes) * 1_000_000 // (3 * SIDE * SIDE * 4))
        self.model = torch.nn.Module()
        for i in range(count):
            whole = distribute_tensor(torch.rand(SIDE, SIDE), mesh, [placement(layout, i)])
            self.model.register_parameter(f"weight{i:03}", torch.nn.Parameter(whole))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() * 0.1
        self.optimizer.step()
        self.bytes = 3 * count * SIDE * SIDE * 4 // dist.get_world_size()
        self.pending = None
        # A thread of async_save communicates, while the ranks go on with the default group.
        self.group = dist.new_group(backend="gloo")

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        dcp.load(self.state(), checkpoint_id=folder)

    def start(self, folder):
        # A stager that is kept would reuse its memory, as ours does; PyTorch 2.11's throws a KeyError for this state.
        self.pending = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.group)

    def wait(self, _):
        self.pending.result()

    def pieces(self):
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                yield tensor.detach().to_local()

    def digest(self):
        out = 0.0
        for piece in self.pieces():
            out = out / 2 + piece.sum(dtype=torch.float64).item()
        return out

    def spoil(self, _):
        for piece in self.pieces():
            piece.zero_()

    def steps(self, count):
        for _ in range(int(count)):
            self.optimizer.step()


def main():
    made = {}

    def doing(what, rest):
        if what == "case":
            made.clear()
            made["case"] = Case(rest)
            return made["case"].bytes
        if what == "digest":
            return made["case"].digest()
        if what in ("save", "start"):
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(rest, ignore_errors=True)
        dist.barrier()
        begin = time.perf_counter()
        getattr(made["case"], what)(rest)
        return (time.perf_counter() - begin) * 1e6

    peer_rank.serve(doing)


if __name__ == "__main__":
    main()

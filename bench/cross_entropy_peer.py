"""Runs cross entropy under PyTorch's loss_parallel; cross_entropy.cpp sends the commands over a socket.

    case DTYPE TOKENS CLASSES   ->   BYTES of this rank's logits
    digest peer                 ->   LOSS, and SUM MAGNITUDE of this rank's gradient
    peak peer                   ->   peak bytes of tensors in a step; of earlier tensors only the logits count
    peer CALLS                  ->   microseconds per step of forward and backward
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # no message that there is no GPU

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import peer_rank


def scrambled(places):
    return places * 2654435761 % 1009 - 504


class Case:
    """Computes the same values as LossCase of cross_entropy_rank.cpp."""

    def __init__(self, text, mesh):
        dtype, tokens, classes = text.split()
        tokens, classes = int(tokens), int(classes)
        mine = torch.arange(classes).chunk(mesh.size())[mesh.get_rank()]
        rows = torch.arange(tokens)
        local = (scrambled(rows[:, None] * classes + mine).float() / 100).to(getattr(torch, dtype))
        self.target = rows * 7919 % classes
        self.logits = DTensor.from_local(local, mesh, [Shard(1)], run_check=False).requires_grad_()
        self.bytes = local.nbytes

    def step(self):
        self.logits.grad = None
        with loss_parallel():
            loss = F.cross_entropy(self.logits, self.target)
            loss.backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    def digest(self):
        loss = self.step()
        gradient = self.logits.grad.to_local().double().flatten()
        products = gradient * scrambled(torch.arange(gradient.numel()))
        return f"{loss} {products.sum().item()} {products.abs().sum().item()}"

    def peak(self):
        self.step()
        self.logits.grad = None
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
            self.step()
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        now = most = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        return self.bytes + most


def main():
    state = {}

    def doing(what, rest):
        if what == "case":
            state.clear()
            state["case"] = Case(rest, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
            return state["case"].bytes
        if what == "digest":
            return state["case"].digest()
        if what == "peak":
            return state["case"].peak()
        return peer_rank.microseconds(state["case"].step, int(rest))

    peer_rank.serve(doing)


if __name__ == "__main__":
    main()

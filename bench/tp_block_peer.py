"""Runs a transformer block under PyTorch's parallelize_module; tp_block.cpp sends the commands over a socket.

    case HIDDEN SEQUENCE BATCH HEADS   ->   ok
    digest peer                        ->   SUM MAGNITUDE of this rank's output, of the input's gradient, and of each
                                            parameter's gradient
    peer CALLS                         ->   microseconds per step of forward and backward
"""

import math

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import peer_rank


class Block(torch.nn.Module):
    def __init__(self, hidden, head_size):
        super().__init__()
        self.head_size = head_size
        self.norm1 = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)
        self.norm2 = torch.nn.LayerNorm(hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def attend(self, qkv):
        """Of this rank's heads: a styled layer gives a plain tensor."""
        s, b, width = qkv.shape
        d = self.head_size
        q, k, v = qkv.view(s, b, width // (3 * d), 3 * d).permute(1, 2, 0, 3).chunk(3, -1)
        weights = torch.softmax((q * (1 / math.sqrt(d))) @ k.transpose(-2, -1), -1)
        return (weights @ v).permute(2, 0, 1, 3).reshape(s, b, width // 3)

    def forward(self, x):
        middle = x + self.out(self.attend(self.qkv(self.norm1(x))))
        return middle + self.down(F.gelu(self.up(self.norm2(middle))))


def digest(t):
    """As in tp_block_rank.cpp."""
    t = (t.to_local() if isinstance(t, DTensor) else t).detach().double().flatten()
    products = t * ((torch.arange(t.numel()) * 2654435761) % 1009 - 504).double()
    return f"{products.sum().item()} {products.abs().sum().item()}"


class Case:
    def __init__(self, text, mesh):
        hidden, sequence, batch, heads = (int(n) for n in text.split())
        block = Block(hidden, hidden // heads)
        with torch.no_grad():
            for i, parameter in enumerate(block.parameters()):
                scale = 1 / math.sqrt(parameter.shape[1]) if parameter.dim() == 2 else 0.1
                parameter.copy_(peer_rank.numbers(list(parameter.shape), i, scale))
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        self.block = parallelize_module(block, mesh, plan)
        self.x = peer_rank.numbers([sequence, batch, hidden], 100, 1).requires_grad_()
        self.gradient = peer_rank.numbers([sequence, batch, hidden], 101, 1)

    def step(self):
        for parameter in self.block.parameters():
            parameter.grad = None
        self.x.grad = None
        y = self.block(self.x)
        y.backward(self.gradient)
        return y

    def digests(self):
        y = self.step()
        return " ".join(digest(t) for t in [y, self.x.grad, *(p.grad for p in self.block.parameters())])


def main():
    state = {}

    def doing(what, rest):
        if what == "case":
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            state["case"] = Case(rest, mesh)
            return "ok"
        if what == "digest":
            return state["case"].digests()
        return peer_rank.microseconds(state["case"].step, int(rest))

    peer_rank.serve(doing)


if __name__ == "__main__":
    main()

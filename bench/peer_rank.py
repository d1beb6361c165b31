"""Code of all ranks of PyTorch's side: it starts Gloo and reads a benchmark's commands from a socket."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist


def numbers(sizes, seed, scale):
    """Computes the same numbers as block.cpp."""
    places = torch.arange(torch.Size(sizes).numel())
    even = ((places * 2654435761 + 7919 * seed) % 1009 - 504).double() / 291.0
    return (even * scale).float().view(sizes)


def microseconds(body, calls):
    """Returns the microseconds of one call of `body`; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        body()
    return (time.perf_counter() - begin) / calls * 1e6


def serve(doing):
    """Answers each line "WHAT REST" with doing(WHAT, REST), until there are no more."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["TESSERA_STORE"], size), rank=rank, world_size=size)
    line_of = socket.socket(socket.AF_UNIX)
    line_of.connect("\0" + sys.argv[1].ljust(107, "\0"))
    files = line_of.makefile("rw", buffering=1)
    print(rank, file=files, flush=True)
    for line in files:
        what, _, rest = line.strip().partition(" ")
        print(doing(what, rest), file=files, flush=True)

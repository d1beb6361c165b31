"""Trains a language model under PyTorch's own parallelism; train.cpp sends the commands over a socket.

    case DP TP ZERO HIDDEN LAYERS HEADS SEQUENCE BATCH   ->   ok
    losses peer N                                        ->   loss and norm of the gradients of each of N first steps
    peer CALLS                                           ->   microseconds per training step

ZERO is 0, or 3 without tensor parallelism.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import peer_rank

VOCABULARY = 256


class Attention(torch.nn.Module):
    def __init__(self, hidden, head_size):
        super().__init__()
        self.head_size = head_size
        self.wq = torch.nn.Linear(hidden, hidden)
        self.wk = torch.nn.Linear(hidden, hidden)
        self.wv = torch.nn.Linear(hidden, hidden)
        self.wo = torch.nn.Linear(hidden, hidden)

    def by_head(self, t):
        """Splits this rank's heads: a styled layer gives a plain tensor."""
        return t.view(t.shape[0], t.shape[1], -1, self.head_size).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.by_head(w(x)) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(torch.nn.Module):
    def __init__(self, hidden, head_size):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(hidden)
        self.attn = Attention(hidden, head_size)
        self.norm2 = torch.nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x):
        middle = x + self.attn(self.norm1(x))
        return middle + self.mlp(self.norm2(middle))


class Transformer(torch.nn.Module):
    """It computes what the Transformer of examples/language_model does, without dropout."""

    def __init__(self, hidden, layers, heads, sequence):
        super().__init__()
        self.tok = torch.nn.Embedding(VOCABULARY, hidden)
        self.pos = torch.nn.Embedding(sequence, hidden)
        self.layers = torch.nn.ModuleList(Block(hidden, hidden // heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(hidden)
        self.head = torch.nn.Linear(hidden, VOCABULARY, bias=False)
        with torch.no_grad():
            for i, (name, parameter) in enumerate(self.named_parameters()):
                if parameter.dim() == 2:
                    parameter.copy_(peer_rank.numbers(list(parameter.shape), i, 0.64 / math.sqrt(hidden)))
                else:
                    parameter.fill_(0 if name.endswith("bias") else 1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan():
    """Cuts the layers over tp; between them activations are cut along the sequence."""
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "tok": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "layers.*.norm[12]": SequenceParallel(),
        "layers.*.attn": gather,
        "layers.*.attn.w[qkv]": ColwiseParallel(),
        "layers.*.attn.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.mlp": gather,
        "layers.*.mlp.up": ColwiseParallel(),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def lay_out_gradient(parameter):
    """Gives a parameter's gradient the layout that the parameter has."""
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


class Training:
    """Holds a fresh model and its optimizer."""

    def __init__(self, case):
        self.case = case
        mesh = case.mesh
        model = Transformer(case.hidden, case.layers, case.heads, case.sequence)
        self.layouts = None
        if case.tp > 1:
            parallelize_module(model, mesh["tp"], plan())
        if case.tp > 1 and case.dp == 1:
            # A norm's gradients come as partial sums. clip_grad_norm_ of 2.11 leaves those unscaled without a word, and
            # it and AdamW would reduce each of them five times.
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lay_out_gradient)
        if case.zero == 3:
            for layer in model.layers:
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        elif case.dp > 1 and case.tp > 1:
            # DDP takes the DTensors' own parts as parameters, and puts DTensors back when it runs the model.
            self.layouts = [parameter.placements for parameter in model.parameters()]
            model = DistributedDataParallel(model, device_mesh=mesh["dp"], gradient_as_bucket_view=True)
        elif case.dp > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)

    def clip(self):
        """Clips by the norm of the gradients of all ranks, and returns it."""
        if self.layouts is None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
            return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        tp = self.case.mesh["tp"]
        gradients = [
            DTensor.from_local(parameter.grad, tp, layout, run_check=False)
            for parameter, layout in zip(self.parameters, self.layouts)
        ]
        norm = torch.nn.utils.get_total_norm(gradients).full_tensor()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, 1.0, norm, foreach=True)
        return norm.item()

    def backward(self):
        logits = self.model(self.case.inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), self.case.targets.flatten())
        loss.backward()
        return loss.detach()

    def step(self):
        """Returns the mean loss of the rows of all ranks, and the norm of the gradients."""
        self.optimizer.zero_grad()
        if self.case.tp > 1:
            with loss_parallel():
                loss = self.backward().full_tensor()
        else:
            loss = self.backward()
        norm = self.clip()
        self.optimizer.step()
        if self.case.dp > 1:
            dist.all_reduce(loss, group=self.case.mesh.get_group("dp"))
        return loss.item() / self.case.dp, norm


class Case:
    def __init__(self, text):
        self.dp, self.tp, self.zero, self.hidden, self.layers, self.heads, self.sequence, batch = map(int, text.split())
        if self.zero not in (0, 3) or (self.zero == 3 and self.tp > 1):
            raise ValueError(f"train_peer knows no ZERO {self.zero} with TP {self.tp}")
        self.mesh = init_device_mesh("cpu", (self.dp, self.tp), mesh_dim_names=("dp", "tp"))
        places = torch.arange(batch * (self.sequence + 1))
        ids = ((places * 2654435761) % 1009 % VOCABULARY).view(batch, self.sequence + 1)
        rows = ids.chunk(self.dp)[self.mesh.get_local_rank("dp")]
        self.inputs, self.targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        self.training = Training(self)

    def losses(self, count):
        """Trains anew, so that they do not depend on earlier steps."""
        self.training = Training(self)
        return " ".join(f"{loss} {norm}" for loss, norm in (self.training.step() for _ in range(count)))


def main():
    state = {}

    def doing(what, rest):
        if what == "case":
            state["case"] = Case(rest)
            return "ok"
        if what == "losses":
            return state["case"].losses(int(rest.split()[1]))
        return peer_rank.microseconds(state["case"].training.step, int(rest))

    peer_rank.serve(doing)


if __name__ == "__main__":
    main()

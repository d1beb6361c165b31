"""Writes the TorchScript modules that script_module_test reads, into the folder named on the command line."""

import pathlib
import sys

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)
        self.down = nn.Linear(16, 12)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(size, size) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, x.size(2) // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        mask = torch.ones([x.size(1), x.size(1)], dtype=torch.bool).tril()
        scores = torch.matmul(q, k.transpose(-2, -1)) * (q.size(-1) ** -0.5)
        scores = scores.masked_fill(mask.logical_not(), -1e9)
        mixed = torch.matmul(torch.softmax(scores, -1), v)
        return self.wo(mixed.transpose(1, 2).reshape(x.size(0), x.size(1), x.size(2)))


class Layer(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attn = Attention(size, heads)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        # Several pointwise operators in a row, and a branch, are what the executor specializes.
        y = self.up(self.norm2(x))
        y = torch.sigmoid(y) * y * 1.5 + 0.25
        if y.size(0) > 1:
            y = y.tanh()
        return x + self.down(y)


class Model(nn.Module):
    """Layers under names that wildcards match, an embedding, a buffer, and a weight that two modules share."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(13, 12)
        self.layers = nn.ModuleList([Layer(12, 4) for _ in range(2)])
        self.head = nn.Linear(12, 13, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("place", torch.randn(6, 12))

    def forward(self, ids):
        x = self.tok(ids) + self.place[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Attends(nn.Module):
    """Attention of each element to all, of which only the values are asked for, or the weights too."""

    def __init__(self, need_weights: bool, batch_first: bool = False, bias: bool = True):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=batch_first, bias=bias)
        self.need_weights = need_weights

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class AttendsMasked(nn.Module):
    """One key is padding; where causal, later ones are hidden too."""

    def __init__(self, causal: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.causal = causal

    def forward(self, x):
        length = x.size(1)
        padding = (torch.arange(length) == 1).unsqueeze(0).expand(x.size(0), length)
        later = torch.ones([length, length], dtype=torch.bool).triu(1)
        if self.causal:
            return self.attention(x, x, x, key_padding_mask=padding, attn_mask=later)[0]
        return self.attention(x, x, x, key_padding_mask=padding)[0]


class Encodes(nn.Module):
    """Layers of a transformer's encoder, which are one operator each in eval() where no gradient is asked for."""

    def __init__(self, norm_first: bool):
        super().__init__()
        activation = "gelu" if norm_first else "relu"
        layer = nn.TransformerEncoderLayer(12, 4, 24, activation=activation, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(x)


class Conv1D(nn.Module):
    """The linear layer of transformers' GPT-2."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class Conv1DMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Conv1D(10, 12)
        self.c_proj = Conv1D(12, 10)

    def forward(self, x):
        return self.c_proj(torch.nn.functional.gelu(self.c_fc(x)))


def halve(self: Mlp, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (inputs[0] * 0.5,)


def negate(self: Mlp, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return -output


def hooked() -> Mlp:
    module = Mlp()
    module.register_forward_pre_hook(halve)
    module.register_forward_hook(negate)
    return module


@torch.jit.script
def product(a, b):
    return torch.matmul(a, b)


@torch.jit.script
def both_products(a, b):
    first = torch.jit.fork(product, a, b)
    second = product(a, b)
    return torch.jit.wait(first) + second


class Forks(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)

    def forward(self, x):
        return both_products(x, self.up.weight.t())


class SwitchesAutocast(Mlp):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.up(x)
        return self.down(torch.nn.functional.gelu(x.to(torch.float32)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x):
        return self.lstm(x)[0]


class AsksForAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(10, 16)

    def forward(self, x, amp: bool = True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
            return self.up(x)


def main():
    folder = pathlib.Path(sys.argv[1])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    mlp, model = Mlp(), Model()
    torch.jit.script(mlp).save(folder / "mlp.pt")
    torch.jit.script(model).save(folder / "model.pt")
    torch.jit.script(Recurrent()).save(folder / "recurrent.pt")
    torch.jit.trace(mlp, torch.randn(5, 10)).save(folder / "traced.pt")
    x = torch.randn(5, 3, 12)
    torch.jit.script(Attends(True)).save(folder / "attends.pt")
    torch.jit.trace(Attends(False, batch_first=True, bias=False), x).save(folder / "attends_without_bias.pt")
    torch.jit.script(Attends(False, batch_first=True).eval()).save(folder / "attends_in_eval.pt")
    torch.jit.script(AttendsMasked(False).eval()).save(folder / "attends_padded_in_eval.pt")
    torch.jit.script(AttendsMasked(True).eval()).save(folder / "attends_causal_in_eval.pt")
    torch.jit.script(Encodes(False).eval()).save(folder / "encodes_in_eval.pt")
    torch.jit.script(Encodes(True).eval()).save(folder / "encodes_norm_first_in_eval.pt")
    torch.jit.trace(Attends(True), x).save(folder / "attends_traced.pt")
    torch.jit.trace(Attends(False, batch_first=True), x).save(folder / "attends_traced_without_weights.pt")
    with torch.no_grad():
        for name, module in (("attends", Attends(False, batch_first=True)), ("encodes", Encodes(False))):
            traced = torch.jit.trace(module.eval(), x, check_trace=False)
            traced.save(folder / f"{name}_traced_in_eval.pt")
    torch.jit.trace(Conv1DMlp(), x).save(folder / "conv1d.pt")
    embedding = nn.Sequential(nn.Embedding(13, 12, max_norm=1.0))
    torch.jit.script(embedding).save(folder / "renormalized.pt")

    scripted = torch.jit.script(mlp).eval()
    torch.jit.freeze(scripted).save(folder / "frozen.pt")
    torch.jit.freeze(torch.jit.script(Mlp().eval()), preserved_attrs=["training"]).save(folder / "frozen_with_training.pt")
    torch.jit.optimize_for_inference(torch.jit.script(Mlp().eval())).save(folder / "optimized.pt")
    torch.jit.script(nn.Sequential(nn.Embedding(13, 12, sparse=True))).save(folder / "sparse.pt")
    torch.jit.script(hooked()).save(folder / "hooked.pt")
    torch.jit.script(nn.Sequential(Forks())).save(folder / "forks.pt")
    torch.jit.script(SwitchesAutocast().float()).save(folder / "switches_autocast.pt")
    torch.jit.script(AsksForAutocast()).save(folder / "asks_for_autocast.pt")


main()

"""The graph that is drawn: followed node by node it gives the decoder's logits, and every node of it counts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.covering import covered, examples, functions
from helpers.drawn_specs import specs
from helpers.families import CONFIGS, spec_of
from helpers.trees import TREES, filled, random_weights
from hypothesis import given, settings
from torch import Tensor

from gptkit.analysis.parameters import count
from gptkit.components import FIRST, Buckets, LatentAttention, ModelSpec
from gptkit.modules import Decoder
from gptkit.modules.context import Context
from gptkit.modules.layers import ACTIVATIONS
from gptkit.modules.positions import alibi_bias, apply_rotary, rotary_tables, sinusoids
from gptkit.parity.outputs import outputs_of
from gptkit.parity.probe import ProbeBatch
from gptkit.report.structure import Kind, Node, Structure, layers_label, structure

ALL: dict[str, ModelSpec] = {**{name: spec_of(config) for name, config in CONFIGS.items()}, **TREES}
BATCH, STEPS = 2, 23  # past the windows of 16, 11 and 9


# --- the graph as a program ------------------------------------------------------------------------------------------


def bucket(positions: Any, queries: Tensor, keys: int) -> Tensor:
    """The bucket of each distance, one after the other, as the paper's code says it."""

    def of(off: int) -> int:
        count, first = positions.buckets, 0
        if positions.both:
            count //= 2
            first = count if off > 0 else 0
        off = abs(off) if positions.both else max(-off, 0)
        exact = count // 2
        far = math.log(max(off, 1) / exact) / math.log(positions.furthest / exact) * (count - exact)
        return first + (off if off < exact else min(exact + int(far), count - 1))

    return torch.tensor([[of(key - int(query)) for key in range(keys)] for query in queries])


@dataclass
class Following:
    """Evaluates a graph on a decoder's parameters: what each operation computes is written here, nothing is taken from
    the decoder but weights, norms, activations and rotary tables.
    """

    graph: Structure
    decoder: Decoder
    cached: dict[str, Tensor] = field(default_factory=dict)
    past: int = 0
    source: Tensor | None = None
    table: Tensor | None = None

    def logits(self, ids: Tensor) -> Tensor:
        if self.graph.encoder is not None:
            own = "embedding.weight" in dict(self.decoder.encoder.named_parameters())
            table = None if own else self.decoder.embedding.weight
            encoder = Following(self.graph.encoder, self.decoder.encoder, table=table)
            self.source = encoder.logits(ids)
            ids = ids.flip(-1)
        self.ids, self.total = ids, self.past + ids.shape[1]
        self.at = torch.arange(self.past, self.total)
        last = self.graph.before[-1].id
        self.begun = self.follow(self.graph.before, "", {})
        x = self.begun[last]
        for layer in range(len(self.graph.spec.blocks)):
            kind = self.graph.kind_of(layer)
            first, *nodes = kind.nodes
            x = self.follow(nodes, f"blocks.{layer}.", {**self.begun, first.id: x})[kind.nodes[-1].id]
        found = self.follow(self.graph.after, "", {self.graph.after[0].inputs[0]: x})[self.graph.after[-1].id]
        self.past = self.total
        return found

    def follow(self, nodes: Any, path: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        for node in nodes:
            given = [values[name] for name in node.inputs]
            values[node.id] = getattr(self, node.op)(node, path, *given)
            sizes = {"B": self.ids.shape[0], "T": self.ids.shape[1], "S": self.total}
            sizes |= {} if self.source is None else {"U": self.source.shape[1]}
            expected = tuple(sizes.get(each, each) for each in node.shape)
            assert tuple(values[node.id].shape) == expected, node.id
        return values

    def module(self, node: Node, path: str) -> Any:
        layer = int(path.split(".")[1]) if path else 0
        if node.id.startswith("shared.") and not node.weights:
            path = f"blocks.{self.graph.spec.shared_block_sources[layer]}."  # which has the weights
        return self.decoder.get_submodule(path + node.id)

    def tokens(self, node: Node, path: str) -> Tensor:
        return torch.zeros_like(self.ids) if node.operation.types else self.ids  # type: ignore[union-attr]

    def embed(self, node: Node, path: str, ids: Tensor) -> Tensor:
        table = self.module(node, path).weight if self.table is None else self.table
        return table[ids.where(ids < len(table), 0)]

    def stream(self, node: Node, path: str, x: Tensor) -> Tensor:
        return x

    def given(self, node: Node, path: str, *made: Tensor) -> Tensor:
        if not path:
            return made[0]
        if node.shape[1] == "U":
            assert self.source is not None
            return self.source
        layer = int(path.split(".")[1])
        if made:
            return made[0] if node.inputs == (FIRST,) else made[0][:, :, layer]
        mixers: Any = [block.attention for block in self.graph.spec.blocks]
        alike = [i for i in range(layer) if mixers[i].kv_signature == mixers[layer].kv_signature]
        made = max(i for i in alike if mixers[i].kv_from != "earlier")
        return self.cached[f"blocks.{made}.{node.id.removesuffix('earlier')}cached"]

    def positions(self, node: Node, path: str) -> Tensor:
        module = self.module(node, path)
        if module.weight is None:
            return sinusoids(module.spec, self.at + module.spec.offset).to(torch.float64)
        padding = node.operation.padding  # type: ignore[union-attr]
        if padding is not None:
            real = (self.ids != padding).long()
            return module.weight[real.cumsum(1) * real - 1 + module.spec.offset]
        return module.weight[self.at + module.spec.offset]

    def norm(self, node: Node, path: str, x: Tensor) -> Tensor:
        return self.module(replace(node, id=node.tied or node.id), path)(
            x.flatten(2) if len(node.shape) < x.dim() else x
        )

    def linear(self, node: Node, path: str, x: Tensor, chosen: Any = None) -> Tensor:
        if node.tied and path:
            return F.linear(x, self.decoder.get_submodule(path + node.tied).weight)
        if node.tied:
            return F.linear(
                x, self.decoder.get_submodule(node.tied).weight, getattr(self.module(node, path), "bias", None)
            )
        shapes = dict(node.weights)
        if node.choice is None:
            module = self.module(node, path)
            own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
            assert own == shapes or (not shapes and node.id.startswith("shared."))
            if module.weight.dim() == 3:  # a matrix for each head
                x = torch.einsum("bthi,hoi->btho", x.unflatten(-1, (len(module.weight), -1)), module.weight).flatten(2)
                return x + module.bias
            y = F.linear(x.flatten(2), module.weight, module.bias)  # heads side by side
            return y.reshape(*y.shape[:2], *[size for size in node.shape[2:] if isinstance(size, int)])
        stem, last = (path + node.id).rsplit(".", 1)
        experts = [self.decoder.get_submodule(f"{stem}.{e}.{last}") for e in range(node.copies)]
        assert {name: tuple(p.shape) for name, p in experts[0].named_parameters()} == shapes
        weight = torch.stack([each.weight for each in experts])[self.chosen]  # (B, T, k, out, in)
        x = x if x.dim() == 4 else x[:, :, None].expand(-1, -1, self.chosen.shape[-1], -1)
        y = torch.einsum("btki,btkoi->btko", x, weight)
        return y if "bias" not in shapes else y + torch.stack([each.bias for each in experts])[self.chosen]

    def rotate(self, node: Node, path: str, x: Tensor) -> Tensor:
        rotate: Any = node.operation
        x = x.reshape(*x.shape[:2], *node.shape[2:])  # type: ignore[arg-type]
        tables = rotary_tables(rotate.rotary, self.at[None], x.dtype)
        end = rotate.start + rotate.turned
        parts = x[..., rotate.start : end].unflatten(-1, (rotate.parts, rotate.rotary.dim))
        done = [apply_rotary(part.transpose(1, 2), tables).transpose(1, 2) for part in parts.unbind(-2)]
        return torch.cat((x[..., : rotate.start], *done, x[..., end:]), dim=-1)

    def temper(self, node: Node, path: str, x: Tensor) -> Tensor:
        context = Context(*x.shape[:2], 0, False, self.at[None], None, x.dtype)
        return context.tempered(node.operation.temperature, x.transpose(1, 2)).transpose(1, 2)  # type: ignore[union-attr]

    def cache(self, node: Node, path: str, x: Tensor) -> Tensor:
        earlier = self.cached.get(path + node.id)
        self.cached[path + node.id] = x if earlier is None else torch.cat((earlier, x), dim=1)
        return self.cached[path + node.id]

    def concat(self, node: Node, path: str, *parts: Tensor) -> Tensor:
        if len(node.shape) == 3:
            return torch.cat(parts, dim=-1)
        heads = node.shape[2]
        whole = [
            part if part.shape[2] == heads else part.flatten(2)[:, :, None].expand(-1, -1, heads, -1) for part in parts
        ]
        return torch.cat(whole, dim=-1)

    def scores(self, node: Node, path: str, q: Tensor, k: Tensor) -> Tensor:
        operation: Any = node.operation
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        return torch.einsum("bthd,bshd->bhts", q, k) * operation.scale

    def alibi(self, node: Node, path: str, scores: Tensor) -> Tensor:
        operation: Any = node.operation
        if isinstance(operation.alibi, Buckets):
            rows = F.one_hot(bucket(operation.alibi, self.at, self.total), operation.alibi.buckets).double()
            return scores + (rows @ self.decoder.relative_bias.weight).permute(2, 0, 1)
        ones = torch.ones(BATCH, self.total, dtype=torch.long)
        bias = alibi_bias(operation.alibi, scores.shape[1], ones, scores.dtype)
        return scores + bias * (operation.scale if operation.alibi.scaled else 1)

    def softmax(self, node: Node, path: str, scores: Tensor) -> Tensor:
        window = node.operation.window  # type: ignore[union-attr]
        if node.shape[-1] == "U":
            return torch.softmax(scores, dim=-1)
        keys, queries = torch.arange(self.total)[None], self.at[:, None]
        seen = keys <= queries if node.operation.causal else torch.ones(self.total, self.total, dtype=torch.bool)  # type: ignore[union-attr]
        if window is not None and not node.operation.causal:  # type: ignore[union-attr]
            seen &= keys < queries + window
        if node.operation.chunked:  # type: ignore[union-attr]
            seen &= keys // window == queries // window
        elif window is not None:
            seen &= keys > queries - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if node.weights:  # of the attention
            sinks = self.decoder.get_submodule(path + node.id.rpartition(".")[0]).sinks
            scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)  # type: ignore[index]
            return torch.softmax(scores, dim=-1)[..., :-1]
        return torch.softmax(scores, dim=-1)

    def mix(self, node: Node, path: str, weights: Tensor, v: Tensor) -> Tensor:
        v = v.repeat_interleave(weights.shape[1] // v.shape[2], dim=2)
        return torch.einsum("bhts,bshd->bthd", weights, v)

    def convolve(self, node: Node, path: str, x: Tensor) -> Tensor:
        module, kernel = self.module(node, path), node.operation.width  # type: ignore[union-attr]
        x = x.flatten(2)
        earlier = self.cached.get(path + node.id, x.new_zeros(x.shape[0], kernel - 1, x.shape[2]))
        whole = torch.cat((earlier, x), dim=1)
        self.cached[path + node.id] = whole[:, whole.shape[1] - kernel + 1 :]
        y = sum(whole[:, at : at + x.shape[1]] * module.weight[:, at] for at in range(kernel))
        y = y if module.bias is None else y + module.bias
        return y.reshape(*y.shape[:2], *[size for size in node.shape[2:] if isinstance(size, int)])

    def pairs(self, node: Node, path: str, x: Tensor) -> Tensor:
        earlier = self.cached.get(path + node.id, torch.zeros_like(x[:, 0]))
        self.cached[path + node.id] = x[:, -1]
        return torch.stack((x, torch.cat((earlier[:, None], x[:, :-1]), dim=1)), dim=2)

    def blend(self, node: Node, path: str, pairs: Tensor) -> Tensor:
        name, (x, before) = node.weights[0][0], pairs.unbind(2)
        w = self.decoder.get_submodule(path + node.id.rpartition(".")[0]).get_parameter(name)
        return before + w * (x - before)

    def scan(self, node: Node, path: str, *given: Tensor) -> Tensor:
        """A recurrence, token by token."""
        made = {
            "gated delta rule": self.delta_rule,
            "state space": self.state_space,
            "selective state space": self.selective_state_space,
            "linear attention": self.linear_attention,
            "real-gated linear recurrence": self.gated_recurrence,
            "weighted mean": self.weighted_mean,
        }[node.title]
        return made(node, path, *given)

    def state_space(self, node: Node, path: str, *given: Tensor) -> Tensor:
        x, b, c, dt = given
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        b, c = (each.repeat_interleave(x.shape[2] // b.shape[2], dim=2) for each in (b, c))
        step = F.softplus(dt + own.dt_bias)
        if x.shape[1] > 1:
            step = step.clamp(own.spec.least, own.spec.most)
        state = self.cached.get(path + node.id, x.new_zeros(x.shape[0], *node.operation.state))  # type: ignore[union-attr]
        found = []
        for t in range(x.shape[1]):
            state = state * torch.exp(-own.A_log.exp() * step[:, t])[:, :, None, None]
            state = state + torch.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], b[:, t])
            found.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + own.D[:, None] * x[:, t])
        self.cached[path + node.id] = state
        return torch.stack(found, dim=1).flatten(2)

    def selective_state_space(self, node: Node, path: str, *given: Tensor) -> Tensor:
        x, dt, b, c = given
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        step = F.softplus(dt)[..., None]
        state = self.cached.get(path + node.id, x.new_zeros(x.shape[0], *node.operation.state))  # type: ignore[union-attr]
        found = []
        for t in range(x.shape[1]):
            state = state * torch.exp(-own.A_log.exp() * step[:, t]) + step[:, t] * b[:, t, None] * x[:, t, :, None]
            found.append(torch.einsum("bin,bn->bi", state, c[:, t]) + own.D * x[:, t])
        self.cached[path + node.id] = state
        return torch.stack(found, dim=1)

    def weighted_mean(self, node: Node, path: str, k: Tensor, v: Tensor) -> Tensor:
        """Over all tokens so far, of which none was forgotten."""
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        keys, values = self.cached.get(path + node.id, (k[:, :0], v[:, :0]))
        first, k, v = keys.shape[1], torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1)
        self.cached[path + node.id] = (k, v)  # type: ignore[assignment]
        found = []
        for t in range(first, k.shape[1]):
            behind = torch.arange(t - 1, -1, -1)[:, None] * own.decay.exp()
            weights = torch.cat((k[:, :t] - behind, (k[:, t] + own.bonus)[:, None]), dim=1).softmax(dim=1)
            found.append((weights * v[:, : t + 1]).sum(dim=1))
        return torch.stack(found, dim=1)

    def gated_recurrence(self, node: Node, path: str, *given: Tensor) -> Tensor:
        x, let_in, let_go = given
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        a = torch.exp(-8 * torch.sigmoid(let_go) * F.softplus(own.decay))
        state, found = self.cached.get(path + node.id), []
        for t in range(x.shape[1]):
            first = state is None
            taken = torch.sigmoid(let_in[:, t]) * x[:, t] * (1 if first else (1 - a[:, t] ** 2).sqrt())
            state = taken if first else a[:, t] * state + taken
            found.append(state)
        self.cached[path + node.id] = state
        return torch.stack(found, dim=1)

    def delta_rule(self, node: Node, path: str, *given: Tensor) -> Tensor:
        q, k, v, beta, decay = given
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for each in (q, k))
        kept = torch.exp(-own.A_log.exp() * F.softplus(decay + own.dt_bias))
        state = self.cached.get(path + node.id, v.new_zeros(v.shape[0], *node.operation.state))  # type: ignore[union-attr]
        found = []
        for t in range(v.shape[1]):
            state = state * kept[:, t, :, None, None]
            lacking = beta.sigmoid()[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], lacking)
            found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[-1] ** 0.5)
        self.cached[path + node.id] = state
        return torch.stack(found, dim=1)

    def linear_attention(self, node: Node, path: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """Weights (1 + s + s²/2) of every earlier token, and what decays have left of them."""
        own = self.decoder.get_submodule(path + node.id.rpartition(".")[0])
        cached = self.cached.get(path + node.id)
        kept = [k, v, F.logsigmoid(-gate)]
        kept = kept if cached is None else [torch.cat(each, dim=1) for each in zip(cached, kept, strict=True)]
        self.cached[path + node.id] = kept
        k, v, g = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in kept)
        s = torch.einsum("bthd,bshd->bhts", q, k) * own.spec.scale
        past, total = k.shape[1] - q.shape[1], g.cumsum(dim=1).transpose(1, 2)
        left = (total[:, :, past:, None] - total[:, :, None]).exp().tril(past)
        weights = (1 + s + s**2 / 2) * left
        return torch.einsum("bhts,bshd->bthd", weights / weights.sum(dim=-1, keepdim=True), v)

    def activation(self, node: Node, path: str, x: Tensor) -> Tensor:
        learnt = dict(node.weights)
        return self.module(node, path)(x) if learnt else ACTIVATIONS[node.title](x.clone())  # type: ignore[index]

    def scale(self, node: Node, path: str, x: Tensor) -> Tensor:
        own = self.module(node, path).weight if node.weights else 1.0
        return x * node.operation.factor * own  # type: ignore[union-attr, no-any-return]

    def cap(self, node: Node, path: str, x: Tensor) -> Tensor:
        operation: Any = node.operation
        limit = operation.limit
        if not operation.hard:
            return torch.tanh(x / limit) * limit
        x = x.reshape(*x.shape[:2], *node.shape[2:]) if len(node.shape) == 4 else x
        return x.clamp(max=limit) if node.id.endswith("gate_limited") else x.clamp(-limit, limit)

    def sparse(self, node: Node, path: str, x: Tensor) -> Tensor:
        half = torch.tensor(node.operation.share, dtype=torch.float32)  # type: ignore[union-attr]
        deviations = torch.erfinv(2 * half - 1) * math.sqrt(2)
        return (x - x.mean(-1, keepdim=True) - x.std(-1, keepdim=True, correction=0) * deviations).clamp(min=0)

    def altup(self, node: Node, path: str, x: Tensor, *others: Tensor) -> Tensor:
        operation: Any = node.operation
        if operation.step == "pick":
            return x[operation.index]
        if operation.step == "predict":
            count = x.shape[0]
            return x + torch.einsum("ibtd,btoi->obtd", x, others[0].unflatten(-1, (count, count)))
        if operation.step == "correct":
            computed, numbers = others
            off = computed - x[operation.index]
            return x + torch.stack([off * (1 + number[..., None]) for number in numbers.unbind(-1)])
        if operation.step == "spread":
            return torch.stack([x[0], *(each + others[0] for each in x[1:])])
        length = x.norm(dim=-1, keepdim=True)
        found = torch.stack([x, *(each * length / each.norm(dim=-1, keepdim=True) for each in others)])
        return found if operation.step == "split" else found.mean(0)

    def product(self, node: Node, path: str, one: Tensor, other: Tensor) -> Tensor:
        return one * other

    def choose(self, node: Node, path: str, scores: Tensor) -> Tensor:
        record: Any = node.operation
        if record.jitter is not None:
            return self.near(scores, record)
        logits, scores = scores, scores.softmax(-1) if record.scores == "softmax" else scores.sigmoid()
        best = logits if record.biased == "logits" else scores
        best = best + self.module(node, path).bias if "bias" in dict(node.weights) else best
        groups = best.unflatten(-1, (record.groups, -1))
        if record.groups > 1:
            sums = groups.topk(record.group_best)[0].sum(-1)
            least = sums.topk(record.top_groups)[0][..., -1:]
            groups = groups.masked_fill((sums < least)[..., None], -torch.inf)
        self.chosen = groups.flatten(-2).topk(record.top_k, dim=-1)[1]
        weights = scores.gather(-1, self.chosen)
        weights = record.multiplier * (
            weights / (weights.sum(-1, keepdim=True) + record.added) if record.normalise else weights
        )
        factors = "weight" in dict(node.weights)
        return weights * self.module(node, path).weight[self.chosen] if factors else weights

    def near(self, logits: Tensor, record: Any) -> Tensor:
        self.chosen = logits.topk(record.top_k, dim=-1)[1]
        weights = []
        for index in range(record.top_k):
            own = logits.gather(-1, self.chosen[..., index : index + 1])
            far = (own - logits) / torch.maximum(logits.abs(), own) > 2 * record.jitter
            others = logits.masked_fill(far, -torch.inf).scatter(-1, self.chosen[..., :index], -torch.inf)
            weights.append(others.softmax(-1).gather(-1, self.chosen[..., index : index + 1]))
        return record.multiplier * torch.cat(weights, dim=-1)

    def shift(self, node: Node, path: str, x: Tensor) -> Tensor:
        return x + node.operation.number  # type: ignore[union-attr]

    def gather(self, node: Node, path: str, x: Tensor, weights: Tensor) -> Tensor:
        return x[:, :, None] * weights[..., None]

    def combine(self, node: Node, path: str, weights: Tensor, outputs: Tensor) -> Tensor:
        return (weights[..., None] * outputs if node.operation.weighs else outputs).sum(2)  # type: ignore[union-attr]

    def add(self, node: Node, path: str, one: Tensor, other: Tensor) -> Tensor:
        return one + (other.reshape(one.shape) if other.numel() == one.numel() else other)  # one for all rows


def ids_of(spec: ModelSpec) -> Tensor:
    return torch.randint(spec.vocab_size, (BATCH, STEPS), generator=torch.Generator().manual_seed(1))


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@covered("name", by=lambda name: functions(ALL[name]))
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_the_graph_followed_gives_the_logits(name: str) -> None:
    spec = ALL[name]
    decoder, ids = filled(spec, random_weights(spec)), ids_of(spec)
    right = outputs_of(decoder, ProbeBatch("", ids))[..., : spec.vocab_size if spec.head else spec.hidden_size]
    assert error(Following(structure(spec), decoder).logits(ids), right) < 1e-12


@pytest.mark.parametrize("name", ["llama-3", "mistral", "falcon-rw", "mixtral", "latent-deepseek", "latent-two-keys"])
@torch.no_grad()
def test_with_its_caches_it_goes_on_where_it_ended(name: str) -> None:
    spec = ALL[name]
    decoder, ids = filled(spec, random_weights(spec)), ids_of(spec)
    following = Following(structure(spec), decoder)
    parts = torch.cat([following.logits(ids[:, :9]), following.logits(ids[:, 9:])], dim=1)
    assert error(parts, decoder(ids)) < 1e-12
    caches = [node for node in following.graph.kinds[0].nodes if node.op == "cache"]
    assert len(following.cached) == len(caches) * len(spec.blocks)
    kept = sum(following.cached[f"blocks.0.{node.id}"][0, 0].numel() for node in caches)
    attention = spec.blocks[0].attention
    if isinstance(attention, LatentAttention):
        assert kept == attention.kv_rank + attention.rope_dim
    else:
        assert kept == 2 * attention.kv_heads * attention.head_dim


def spoilt(graph: Structure) -> Iterator[tuple[str, Structure]]:
    """The graph with one mistake: a node passed by, an input of a sum left out, two inputs exchanged."""

    def changed(node: Node, new: Node) -> Structure:
        def swap(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
            return tuple(new if each is node else each for each in nodes)

        kinds = tuple(Kind(kind.layers, kind.block, swap(kind.nodes)) for kind in graph.kinds)
        return Structure(graph.spec, swap(graph.before), kinds, swap(graph.after))

    nodes = [*graph.before, *(node for kind in graph.kinds for node in kind.nodes), *graph.after]
    shapes = {node.id: node.shape for node in nodes}
    for node in nodes:
        passed = [name for name in node.inputs if shapes.get(name) == node.shape and name != node.choice]
        if node.op in ("norm", "rotate", "activation", "alibi") and passed:
            yield f"without {node.id}", changed(node, replace(node, op="product", inputs=(passed[0], "one")))
        if node.op == "add":
            for left in passed:
                yield f"{node.id} without {left}", changed(node, replace(node, inputs=(left, left)))
        if node.op == "linear" and len(passed) == 1 and node.id != "attention.o_proj":
            yield (
                f"without {node.id}",
                changed(node, replace(node, op="product", inputs=(passed[0], "one"), weights=())),
            )


class Passing(Following):
    """Knows an input "one", by which a product is what it is multiplied with."""

    def follow(self, nodes: Any, path: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().follow(nodes, path, {**values, "one": torch.ones(())})


@pytest.mark.parametrize("name", ["gpt2", "bloom-post-norm", "qwen3", "falcon-40b", "mixtral", "latent-deepseek"])
@torch.no_grad()
def test_every_node_counts(name: str) -> None:
    spec = ALL[name]
    decoder, ids = filled(spec, random_weights(spec)), ids_of(spec)
    right = decoder(ids)
    graph = structure(spec)
    mistakes = list(spoilt(graph))
    assert len(mistakes) > 8
    for what, wrong in mistakes:
        assert error(Passing(wrong, decoder).logits(ids), right) > 1e-3, what


# --- against what the papers say --------------------------------------------------------------------------------------


def nodes_of(name: str, layer: int = 0) -> dict[str, Node]:
    graph = structure(ALL[name])
    return {node.id: node for node in graph.path(graph.kind_of(layer))}


def test_gpt2_is_serial_with_norms_first_and_learned_positions() -> None:
    nodes = nodes_of("gpt2")
    assert nodes["embedded"].inputs == ("embedding", "positions")
    assert nodes["x"].inputs == ("embedded",)
    assert nodes["attention_norm"].inputs == ("x",)
    assert nodes["attention_output"].inputs == ("x", "attention.o_proj") and nodes["attention_output"].residual == "x"
    assert nodes["feed_forward_norm"].inputs == ("attention_output",)
    assert nodes["block_output"].residual == "attention_output"
    assert not [node for node in nodes.values() if node.op in ("rotate", "alibi")]
    assert [(e.source, e.kind) for e in nodes["head"].edges()] == [("final_norm", "data"), ("embedding", "weights")]
    assert nodes["head"].parameters == 0


def test_falcon_7b_is_parallel_with_one_norm_and_one_key_head() -> None:
    nodes = nodes_of("falcon-7b")
    norm = "attention_norm"
    assert {nodes[f"attention.{each}_proj"].inputs for each in "qkv"} == {(norm,)}
    assert nodes["feed_forward.up_proj"].inputs == (norm,)
    assert "feed_forward_norm" not in nodes
    assert nodes["both"].inputs == ("attention.o_proj", "feed_forward.down_proj")
    assert nodes["block_output"].inputs == ("x", "both")
    assert nodes["attention.k_proj"].shape == ("B", "T", 1, 8)
    assert "1 kv head" in nodes["attention.scores"].detail
    two = nodes_of("falcon-40b")
    assert two["feed_forward_norm"].inputs == ("x",) and two["feed_forward.up_proj"].inputs == ("feed_forward_norm",)


def test_bloom_is_serial_with_a_norm_on_the_embedding_and_alibi_on_the_scores() -> None:
    nodes = nodes_of("bloom")
    assert nodes["embedding.norm"].inputs == ("embedding",)
    assert nodes["attention.alibi"].inputs == ("attention.scores",)
    assert nodes["attention.weights"].inputs == ("attention.alibi",)
    assert nodes["attention_output"].residual == "x"
    past = nodes_of("bloom-post-norm")
    assert past["attention_output"].residual == "attention_norm"
    assert past["block_output"].residual == "feed_forward_norm"


def test_qwen3_norms_heads_before_it_turns_them() -> None:
    nodes = nodes_of("qwen3")
    for part in "qk":
        assert nodes[f"attention.{part}_norm"].inputs == (f"attention.{part}_proj",)
        assert nodes[f"attention.{part}_rotated"].inputs == (f"attention.{part}_norm",)
    assert nodes["attention.v_cached"].inputs == ("attention.v_proj",)
    assert nodes["attention.scores"].detail == "6 q heads, 3 to each kv head"


def test_mixtral_sends_each_token_to_the_experts_of_its_router() -> None:
    nodes = nodes_of("mixtral")
    chosen = nodes["feed_forward.chosen"]
    assert chosen.inputs == ("feed_forward.router",) and chosen.title == "top 2 of 4"
    gate = nodes["feed_forward.experts.gate_proj"]
    assert gate.copies == 4 and gate.shape == ("B", "T", 2, 80)
    assert [(edge.source, edge.kind) for edge in gate.edges()] == [
        ("feed_forward_norm", "data"),
        ("feed_forward.chosen", "choice"),
    ]
    assert nodes["feed_forward.combined"].inputs == ("feed_forward.chosen", "feed_forward.experts.down_proj")


def test_a_latent_is_what_keys_and_values_are_made_of() -> None:
    nodes = nodes_of("latent-deepseek")
    assert nodes["attention.latent_cached"].shape == ("B", "S", 20)
    assert nodes["attention.k_up_proj"].inputs == nodes["attention.v_up_proj"].inputs == ("attention.latent_cached",)
    assert nodes["attention.k_whole"].inputs == ("attention.k_up_proj", "attention.k_rope_cached")
    assert nodes["attention.scores"].inputs == ("attention.q_rotated", "attention.k_whole")


def test_windows_and_kinds_of_layers() -> None:
    graph = structure(ALL["qwen2-layer-types"])
    assert [kind.layers for kind in graph.kinds] == [(0, 2), (1,)]
    assert [layers_label(graph, kind) for kind in graph.kinds] == ["2 layers: 0, 2", "layer 1"]
    first, second = ({node.id: node for node in kind.nodes} for kind in graph.kinds)
    assert first["attention.weights"].detail == "causal, last 16" and second["attention.weights"].detail == "causal"
    with pytest.raises(IndexError):
        graph.kind_of(3)


# --- any tree ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(60))
@given(specs())
def test_all_parameters_are_somewhere_and_edges_lead_from_what_is_computed(spec: ModelSpec) -> None:
    graph = structure(spec)
    total = sum(node.parameters for node in (*graph.before, *graph.after))
    total += sum(node.parameters * len(kind.layers) for kind in graph.kinds for node in kind.nodes)
    assert total == count(spec).total
    names = {each.name.rpartition(".")[0] for each in spec.parameters()}
    for kind in graph.kinds:
        known: set[str] = set()
        path = graph.path(kind)
        for node in path:
            assert {edge.source for edge in node.edges()} <= known, node.id
            assert node.id not in known
            known.add(node.id)
        used = {source for node in path for source in node.inputs}
        assert known - used == {"head"}
        here = f"blocks.{kind.layers[0]}."
        plain = {here + node.id for node in kind.nodes if node.weights and node.choice is None}
        assert plain == {name for name in names if name.startswith(here) and ".experts." not in name}

"""Somebody's own port, with its own names and its own mistakes, held against transformers."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.command import call
from helpers.covering import exhaustive, few

from gptkit.errors import InvalidInput, UsageError
from gptkit.parity.port import load_port, verify_port
from gptkit.parity.port_causes import PADDING
from gptkit.report.verification import port_causes

PORT = '''
"""A llama written from scratch: other names, q, k and v in one matrix, no gptkit modules."""

import json, math
from pathlib import Path
import torch
from torch import nn
from safetensors.torch import load_file

FOLDER = Path({folder!r})
C = json.loads((FOLDER / "config.json").read_text())
D, H, KV, HD = C["hidden_size"], C["num_attention_heads"], C["num_key_value_heads"], C["head_dim"]


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.g * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + {eps})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = Norm(), Norm()
        self.wqkv = nn.Linear(D, (H + 2 * KV) * HD, bias=False)
        self.wo = nn.Linear(H * HD, D, bias=False)
        self.w1 = nn.Linear(D, C["intermediate_size"], bias=False)
        self.w3 = nn.Linear(D, C["intermediate_size"], bias=False)
        self.w2 = nn.Linear(C["intermediate_size"], D, bias=False)

    def rope(self, x):
        T = x.shape[-2]
        freq = {base} ** (-torch.arange(0, HD, 2, dtype={tables}) / HD)
        angle = torch.arange(T, dtype={tables})[:, None] * freq{scaling}
        a, b = {pairs}
        turned = torch.stack if {interleaved} else torch.cat
        out = turned(({first}, {second}), dim=-1)
        return out.flatten(-2) if {interleaved} else out

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.wqkv(self.n1(x)).split([H * HD, KV * HD, KV * HD], dim=-1)
        q, k, v = (t.view(B, T, -1, HD).transpose(1, 2) for t in (q, k, v))
        q, k = {roped}
        k, v = ({spread} for t in (k, v))
        s = q @ k.transpose(-1, -2) / math.sqrt(HD)
        s = s.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))
        h = self.n2(x)
        return x + self.w2(nn.functional.{activation}(self.w1(h)) * self.w3(h))


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(C["vocab_size"], D)
        self.layers = nn.ModuleList(Layer() for _ in range(C["num_hidden_layers"]))
        self.norm = Norm()
        self.out = nn.Linear(D, C["vocab_size"], bias=False)

    def forward(self, {takes}):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def build():
    w = {{k: v.float() for k, v in load_file(FOLDER / "model.safetensors").items()}}
    port = Port()
    with torch.no_grad():
        port.tok.weight.copy_(w["model.embed_tokens.weight"])
        port.norm.g.copy_(w["model.norm.weight"])
        port.out.weight.copy_(w["lm_head.weight"])
        for i, layer in enumerate(port.layers):
            p = f"model.layers.{{i}}."
            layer.n1.g.copy_(w[p + "input_layernorm.weight"])
            layer.n2.g.copy_(w[p + "post_attention_layernorm.weight"])
            layer.wqkv.weight.copy_(torch.cat([w[p + f"self_attn.{{n}}_proj.weight"] for n in "qkv"]))
            layer.wo.weight.copy_(w[p + "self_attn.o_proj.weight"])
            layer.w1.weight.copy_(w[p + "mlp.{gate}_proj.weight"])
            layer.w3.weight.copy_(w[p + "mlp.{up}_proj.weight"])
            layer.w2.weight.copy_(w[p + "mlp.down_proj.weight"])
    return port


class Bare(nn.Module):
    """A port whose own modules are hidden in a list."""

    def __init__(self):
        super().__init__()
        self.hidden = [build()]

    def forward(self, ids):
        return self.hidden[0].to(torch.get_default_dtype())(ids)


def nothing():
    return 7


class Wrong(nn.Module):
    def forward(self, ids):
        return torch.zeros(*ids.shape, 3)


def other_vocabulary():
    return Wrong()
'''

SAMPLE = Path(__file__).parents[2] / "samples" / "llama"
COS_SIN = "a * angle.cos() - b * angle.sin()", "b * angle.cos() + a * angle.sin()"
RIGHT = {
    "folder": str(SAMPLE),
    "eps": "C['rms_norm_eps']",
    "base": "C['rope_parameters']['rope_theta']",
    "scaling": "",
    "pairs": "x.chunk(2, dim=-1)",
    "interleaved": "False",
    "activation": "silu",
    "gate": "gate",
    "up": "up",
    "first": COS_SIN[0],
    "second": COS_SIN[1],
    "roped": "self.rope(q), self.rope(k)",
    "takes": "ids",
    "tables": "x.dtype",
    "spread": "t.repeat_interleave(H // KV, dim=1)",
}
WRONG = {
    "eps": ({"eps": "C['rms_norm_eps'] * 10"}, "attention norm", "norms with an eps of 1e-05"),
    "rope": (
        {"pairs": "x[..., 0::2], x[..., 1::2]", "interleaved": "True"},
        "attention mix",
        "RoPE pairs element 0 with 1 instead of d/2",
    ),
    "base": ({"base": "500000.0"}, "attention mix", "a RoPE base of 500,000"),
    "odd base": (
        {"base": "(C['rope_parameters']['rope_theta'] / 10)"},
        "attention mix",
        "wrong rope base, the other way round",
    ),
    "halved": ({"scaling": " / 2"}, "attention mix", "RoPE positions divided by 2"),
    "quartered": ({"scaling": " / 4"}, "attention mix", "RoPE positions divided by 4"),
    "doubled": ({"scaling": " * 2"}, "attention mix", "RoPE positions divided by 2, the other way round"),
    "queries": ({"roped": "self.rope(q), k"}, "attention mix", "RoPE on queries alone"),
    "keys": ({"roped": "q, self.rope(k)"}, "attention mix", "RoPE on keys alone"),
    "none": ({"roped": "q, k"}, "attention mix", "no RoPE"),
    "sign": (
        {"first": COS_SIN[0].replace("-", "+"), "second": COS_SIN[1].replace("+", "-")},
        "attention mix",
        "RoPE turned the other way",
    ),
    "minus": ({"first": COS_SIN[0].replace("-", "+")}, "attention mix", "RoPE adds where it should subtract"),
    "tiled": ({"spread": "t.repeat(1, H // KV, 1, 1)"}, "attention mix", "key-value heads tiled, not repeated"),
    "tiled, with tables in fp32": (
        {"spread": "t.repeat(1, H // KV, 1, 1)", "tables": "torch.float32"},
        "attention mix",
        "key-value heads tiled, not repeated",
    ),
    "activation": ({"activation": "gelu"}, "feed-forward activation", "the activation gelu"),
    "gate": ({"gate": "up", "up": "gate"}, "feed-forward activation", "gate and up swapped"),
}
"""A port's mistake: what is written otherwise, where it shows, and what is told as the cause."""


@pytest.fixture
def port(tmp_path, monkeypatch):
    """Write a port as a module of its own name; gives its reference."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, **changes: str) -> str:
        text = textwrap.dedent(PORT).format(**{**RIGHT, **changes})
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return f"{name}:build"

    return write


def test_a_right_port_is_the_same(port):
    result = verify_port("sample:llama", port("right_port"))
    assert result.verdict in ("identical", "equal")
    assert result.passed
    assert result.functions <= result.allowed < 1e-3


@few(1)
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=pytest.mark.slow if each in ("odd base", "doubled", "keys") else ()) for each in WRONG],
)
def test_a_wrong_port_is_told_where(port, mistake):
    changes, place, cause = WRONG[mistake]
    result = verify_port("sample:llama", port(f"port_with_wrong_{mistake.replace(' ', '_')}", **changes))
    assert result.verdict == "different"
    assert result.first is not None
    assert result.first.place.layer == 0
    assert result.first.place.label.startswith(place)
    assert [(made.mistake, made.explains) for made in result.causes] == [(cause, True)]
    assert result.causes[0].left <= result.allowed


UNMASKED = {"takes": "ids, attention_mask=None"}
"""A port that takes a mask and does not use it."""


def test_padding_that_is_ignored_is_a_cause(port):
    result = verify_port("sample:llama", port("port_without_mask", **UNMASKED))
    assert result.verdict == "different"
    assert [(made.mistake, made.explains, made.also) for made in result.causes] == [(PADDING, True, "")]
    assert result.first is None
    (line,) = port_causes(result)
    assert line == f"{PADDING}: with this mistake, the reference gives the same results as your port"


@few(1)
@pytest.mark.parametrize("mistake", ["rope", "eps", "queries", "activation"])
def test_ignored_padding_hides_no_other_mistake(port, mistake):
    changes, place, cause = WRONG[mistake]
    result = verify_port("sample:llama", port(f"unmasked_{mistake}", **changes, **UNMASKED))
    assert result.first is not None
    assert result.first.place.label.startswith(place)
    assert [(made.mistake, made.explains, made.also) for made in result.causes] == [(cause, True, PADDING)]


@exhaustive
@few(1)
@pytest.mark.parametrize(
    "mistakes", [("queries", "activation"), ("eps", "gate"), ("rope", "eps"), ("tiled", "activation"), ("sign", "base")]
)
@pytest.mark.parametrize(
    "masked", [pytest.param({}, id="no mask"), pytest.param(UNMASKED, marks=pytest.mark.slow, id="mask ignored")]
)
def test_two_mistakes_are_found_together(port, mistakes, masked):
    both = {key: value for mistake in mistakes for key, value in WRONG[mistake][0].items()}
    result = verify_port("sample:llama", port("port_with_" + "_and_".join(mistakes), **both, **masked))
    (made,) = result.causes
    assert made.explains
    assert made.left <= max(result.allowed, 1e-5 * result.functions)
    named = {made.mistake, *made.also.split(", ")} - {PADDING}
    assert named == {WRONG[mistake][2] for mistake in mistakes}
    assert (PADDING in made.also) == bool(masked)


def test_a_port_without_modules_has_nothing_to_compare(port, tmp_path):
    """No component is called wrong and no cause is made up: the notes say that there is nothing to look at."""
    bare = port("bare_port", **WRONG["rope"][0]).replace("build", "Bare")
    result = verify_port("sample:llama", bare)
    assert result.verdict == "different"
    assert (result.matches, result.first) == ((), None)
    assert any("they return only the logits" in note for note in result.notes)
    assert [(made.mistake, made.explains) for made in result.causes] == [(WRONG["rope"][2], True)]
    page = tmp_path / "page.html"
    run = call("verify", "sample:llama", "--against", bare, "--html", str(page))
    assert run.exit_code == 3, run.output
    assert "place" not in {line.split()[0] for line in run.stdout.splitlines() if line}
    assert "The components were not compared" in page.read_text()


@pytest.mark.exhaustive
def test_a_mistake_that_nobody_thought_of_has_no_cause(port):
    result = verify_port("sample:llama", port("odd_mistake", activation="softsign"))
    assert result.verdict == "different"
    assert result.causes == ()
    tried = result.as_json()["tried"]
    assert {"q and k swapped", "the activation quick_gelu"} < {*tried["mistakes"]} and tried["pairs"] > 100
    (line,) = port_causes(result)
    assert line == (
        f"not found: gptkit tried {len(tried['mistakes'])} known mistakes one at a time, and {tried['pairs']:,} pairs "
        "of them; --json lists them (tried)"
    )


@pytest.mark.exhaustive
def test_a_port_cannot_widen_its_own_bound(port):
    """Its angles are so large that its own fp32 is far from its fp64; another one rounds to bf16 inside."""
    result = verify_port("sample:llama", port("loud_port", base="1000 / 10000"))
    assert result.verdict == "different"
    assert result.allowed < 1e-3
    assert result.first is not None
    assert result.first.place.name.startswith("layer 0 attention mix")
    coarse = "(t if t.dtype == torch.float64 else t.bfloat16().float() for t in (self.rope(q), self.rope(k)))"
    result = verify_port("sample:llama", port("rough_port", roped=coarse))
    assert result.functions <= result.allowed
    assert result.imprecise
    assert result.verdict == "different"
    run = call("verify", "sample:llama", "--against", "rough_port:build")
    assert run.exit_code == 3
    assert "float32 rounds worse" in run.stdout


def test_what_the_port_was_not_given_is_told(port):
    """Its forward takes no mask, so that padding was never tried."""
    command = ("verify", "sample:llama", "--against", port("unmasked_port"), "--json")
    run = call(*command)
    found = json.loads(run.stdout)
    assert found["left_out"] == ["left padding", "right padding"]
    assert found["score"]["caught"] and not found["score"]["missed"]
    assert "probe 22 of 22 mistakes made on purpose were caught" in " ".join(call(*command[:-1]).stdout.split())
    assert json.loads(call(*command, "--no-mutations").stdout)["score"] is None
    assert {prompt["name"] for prompt in found["prompts"]}.isdisjoint(found["left_out"])
    assert found["notes"] == [
        "not tested: left padding, right padding, because forward() of your module has no argument attention_mask"
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("--prompt", "a"),
        ("--up-to", "8"),
        ("--stream",),
        ("--damage",),
        ("--dtype", "bfloat16"),
        ("--attention", "eager"),
    ],
    ids=" ".join,
)
def test_options_of_two_checkpoints_are_refused(words: tuple[str, ...]) -> None:
    told = call("verify", "sample:llama", "--against", "my_port:build", *words)
    assert told.exit_code == 2 and f"--against cannot be combined with {words[0]}" in told.stderr


def test_the_command(port):
    wrong = port("wrong_port", **WRONG["rope"][0])
    run = call("verify", "sample:llama", "--against", wrong)
    assert run.exit_code == 3, run.output
    assert "no module of yours computes" in run.stdout
    said = " ".join(run.stdout.split())
    cause = "RoPE pairs element 0 with 1 instead of d/2"
    assert f"cause {cause}: with this mistake, the reference gives" in said
    assert "probe 5 inputs with 361 tokens" in said
    assert (
        "note: not tested: left padding, right padding, because forward() of your module has no argument "
        "attention_mask" in said
    )
    assert max(len(line) for line in run.stdout.splitlines()) <= 80
    assert call("verify", "sample:llama", "--against", port("fine_port")).exit_code == 0


def test_what_is_no_port_is_refused(port):
    port("odd_port")
    wrong = ["odd_port", "odd_port:", ":build", "no_such_module:build", "odd_port:nobody", "odd_port:nothing"]
    for reference in [*wrong, "os:system", "os:sep", "math:pi"]:
        with pytest.raises(UsageError):
            load_port(reference)
    with pytest.raises(InvalidInput, match="logits"):
        verify_port("sample:llama", "odd_port:other_vocabulary")


BROKEN = """
import torch
from torch import nn

{at_import}

class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(4, 4)

    def forward(self, ids):
        {body}

def build():
    {at_build}
    return Port()
"""
BREAKS = {
    "at import": ({"at_import": "1 / 0"}, r"raised ZeroDivisionError: .*while it was imported, in {name}\.py:5"),
    "in its syntax": ({"at_import": "def ("}, r"raised SyntaxError: .*while it was imported, in {name}\.py:5"),
    "by leaving": (
        {"at_import": "raise SystemExit(0)"},
        r"raised SystemExit: 0, while it was imported, in {name}\.py:5",
    ),
    "when built": (
        {"at_build": "{{}}['no.weight']"},
        r"raised KeyError: 'no.weight', when it was called, in {name}\.py:16",
    ),
    "in a pass": (
        {"body": "return self.table(ids.float())"},
        r"your module raised RuntimeError: .*shapes.*, for the input 'one token' in float32, in {name}\.py:13",
    ),
    "in float64": (
        {"body": "return self.table(torch.ones(*ids.shape, 4, dtype=torch.float32))"},
        r"your module raised RuntimeError: .*, for the input 'one token' in float64, in {name}\.py:13",
    ),
    "with a dictionary": (
        {"body": "return {{'logits': ids}}"},
        r"must return logits of shape \(batch, length, vocabulary\), but returned a dict",
    ),
    "with the last logits": (
        {"body": "return torch.zeros(len(ids), 1, 512)"},
        r"\(batch, length, vocabulary\), but returned float32 \(1, 1, 512\) for token ids of shape \(1, 64\)",
    ),
    "with integers": (
        {"body": "return ids[..., None]"},
        r"must return logits of shape \(batch, length, vocabulary\), but returned int64 \(1, 1, 1\)",
    ),
    "with nothing": (
        {"body": "return ()"},
        r"must return logits of shape \(batch, length, vocabulary\), but returned a tuple",
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_port_that_breaks_is_told_with_its_own_line(how, tmp_path, monkeypatch):
    """As the user's and not as a bug of gptkit's: what was raised, on which input, where; and no traceback."""
    changes, told = BREAKS[how]
    name = f"breaks_{how.replace(' ', '_')}"
    plain = {"at_import": "", "body": "return ids", "at_build": ""}
    (tmp_path / f"{name}.py").write_text(
        BROKEN.format(**{**plain, **{key: text.format() for key, text in changes.items()}})
    )
    monkeypatch.chdir(tmp_path)
    run = call("verify", "sample:llama", "--against", f"{name}:build")
    assert run.exit_code == 4, run.output
    assert re.search(told.format(name=name), " ".join(run.stderr.split())), run.stderr
    assert "bug in gptkit" not in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) <= 2


def test_os_system_is_no_port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = call("verify", "sample:llama", "--against", "os:system")
    assert run.exit_code == 2
    assert "os:system cannot be called without arguments" in run.stderr

"""Drafts of definitions: what is guessed from names and shapes, what is told to be open, and what is refused."""

import ast
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.command import call
from helpers.covering import exhaustive
from helpers.families import REPRESENTATIVES, save_hf, shallow
from helpers.processes import gptkit as gptkit_alone
from helpers.processes import python
from helpers.unknown import saved
from safetensors.numpy import save_file

from gptkit import architectures, errors, plugins
from gptkit.components import GatedFeedForward
from gptkit.drafting import draft as drafts
from gptkit.drafting.guess import guess
from gptkit.drafting.trial import answered
from gptkit.drafting.vocabulary import known_names

LAYERS = 2
PLAIN = {
    "model_type": "nobody_knows",
    "architectures": ["NobodyForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""The config.json of a llama under a type that transformers does not have."""


def named(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `PLAIN`, and others in each layer."""
    layer = {
        **{f"self_attn.{name}_proj": (width, 32) for name, width in zip("qkv", (32, 16, 16), strict=True)},
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    ends = {"model.embed_tokens.weight": (97, 32), "model.norm.weight": (32,), "lm_head.weight": (97, 32)}
    own = {f"model.layers.{number}.{name}.weight": shape for number in range(LAYERS) for name, shape in layer.items()}
    return {**ends, **own, **shapes}


def checkpoint(folder: Path, config: Mapping[str, Any] | None, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if shapes:
        save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafts are tried in this process, which has imported transformers already, and register nothing that stays."""
    held = [(table, dict(table)) for table in (architectures.ARCHITECTURES, architectures.BY_MODEL_TYPE)]

    def asked(question: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = answered(json.loads(json.dumps(question)))
        for table, before in held:
            table.clear()
            table.update(before)
        if "refused" in answer:
            kind, message, hint = answer["refused"]
            raise getattr(errors, kind)(message, hint)
        return answer

    monkeypatch.setattr(drafts, "_asked", asked)
    yield
    for table, before in held:
        table.clear()
        table.update(before)


def test_a_family_like_llama_passes_at_once(tmp_path: Path) -> None:
    save_hf(shallow(REPRESENTATIVES["mistral"].config), tmp_path / "model")
    found = drafts.draft(tmp_path / "model", tmp_path / "own.py", without=("mistral",))
    assert [(each.name, each.holds) for each in found.proofs] == [
        (name, True) for name in ("fields", "elements", "names", "logits")
    ], found
    assert found.todo == ()
    text = (tmp_path / "own.py").read_text()
    assert "the four proofs pass" in text and "TODO" not in text
    assert "97 is the number of rows of model.embed_tokens.weight" in text


def test_what_nothing_explains_is_told(tmp_path: Path) -> None:
    """A type that transformers does not have, with a multiplier and a tensor that no family knows."""
    shapes = named(**{f"model.layers.{number}.wobble.weight": (7,) for number in range(LAYERS)})
    folder = checkpoint(tmp_path / "model", {**PLAIN, "wobble_multiplier": 2.5}, shapes)
    done = call("draft", folder, "--out", tmp_path / "own.py", "--json")
    assert done.exit_code == 3, done.output
    told = json.loads(done.stdout)
    holds = {each["name"]: each["holds"] for each in told["proofs"]}
    assert holds == {"fields": True, "elements": True, "names": False, "logits": None}
    assert any("wobble_multiplier" in each for each in told["todo"])
    assert any("wobble.weight (7,)" in each for each in told["todo"])
    text = (tmp_path / "own.py").read_text()
    assert text.count("TODO") >= 2 and "names: fails" in text
    assert "'wobble_multiplier': ((2.5,), 'TODO" in text  # refused where it is another


@pytest.mark.exhaustive
def test_a_definition_without_a_class_reads_its_checkpoint(tmp_path: Path) -> None:
    """Biases by their names, and the file as a plugin of another process."""
    biases = {
        f"model.layers.{number}.self_attn.{name}_proj.bias": (width,)
        for number in range(LAYERS)
        for name, width in (("q", 32), ("k", 16), ("v", 16))
    }
    folder = checkpoint(tmp_path / "model", {**PLAIN, "attention_bias": True}, named(**biases))
    found = drafts.draft(folder, tmp_path / "own.py")
    assert [each.holds for each in found.proofs] == [True, True, True, None]
    plugins.import_file(tmp_path / "own.py")
    done = call("load", folder)
    assert done.exit_code == 0 and "nobody_knows" in done.stdout, done.output


SIGNS = ('"""', "'", "\n", "\\", "{layer.__class__}", "#", "\u202e")


@pytest.mark.parametrize(
    "sign", ["".join(SIGNS), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SIGNS)]
)
def test_a_hostile_name_is_data(sign: str, tmp_path: Path) -> None:
    """No name of a tensor or a field, and no value, ends a string, a comment or a docstring of the file."""
    mark = tmp_path / "mark"
    code = f"{sign}\n__import__('pathlib').Path({str(mark)!r}).touch()\n{sign}"
    config = {
        **PLAIN,
        "model_type": f"own {sign.strip()}" if sign.isprintable() else "own",
        code: 1,
        "said": code,
        "architectures": [code],
    }
    shapes = named(**{f"model.layers.0.{code}.weight": (3,), f"model.layers.0.odd{sign}.weight": (3,)})
    folder = checkpoint(tmp_path / "model", config, shapes)
    drafts.draft(folder, tmp_path / "own.py")
    tree = ast.parse((tmp_path / "own.py").read_text("utf-8"))
    kinds = {type(each) for each in tree.body}
    assert kinds == {ast.Expr, ast.ImportFrom, ast.Assign}
    (docstring, registered) = [each for each in tree.body if isinstance(each, ast.Expr)]
    assert isinstance(docstring.value, ast.Constant) and ast.unparse(registered) == "register(FAMILY)"
    called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
    assert called <= {"Field", "DecoderFamily", "Leaf", "leaves_of", "DECODER.architecture", "register", "RotaryKind"}
    assert not mark.exists()


@pytest.mark.parametrize(
    ("config", "shapes", "out", "code", "words"),
    [
        (None, named(), "own.py", 4, "config.json"),
        (PLAIN, {}, "own.py", 4, ""),
        pytest.param(
            *({**PLAIN, "hidden_size": 64}, named(), "own.py", 4, "do not match"), marks=pytest.mark.exhaustive
        ),
        ({**PLAIN, "num_hidden_layers": 5}, named(), "own.py", 4, "do not match"),
        (PLAIN, {"weight": (3, 4)}, "own.py", 4, "layer number"),
        ({key: value for key, value in PLAIN.items() if key != "model_type"}, named(), "own.py", 4, "model_type"),
        ({**PLAIN, "text_config": PLAIN}, named(), "own.py", 4, "several models"),
        (PLAIN, named(), "own.txt", 2, "Python file"),
        (PLAIN, named(), "there.py", 2, "exists already"),
        (PLAIN, named(), "no/own.py", 2, "does not exist"),
        ({**PLAIN, "model_type": "llama"}, named(), "own.py", 2, "already supports the family llama"),
    ],
)
def test_bad_input_is_a_line_and_a_way_on(
    config: Any, shapes: Any, out: str, code: int, words: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path / "model", config, shapes)
    (tmp_path / "there.py").write_text("kept")
    done = call("draft", folder, "--out", tmp_path / out)
    assert done.exit_code == code, done.output
    said, *hint = done.stderr.splitlines()
    assert words in said and hint, done.stderr
    assert (tmp_path / "there.py").read_text() == "kept" and not (tmp_path / "own.py").exists()


@pytest.mark.exhaustive
def test_a_process_of_its_own(tmp_path: Path) -> None:
    """From the command to the file that another command is told by, and a refusal on its way back."""
    folder = checkpoint(tmp_path / "model", PLAIN, named())
    done = gptkit_alone("draft", str(folder), "--out", str(tmp_path / "own.py"))
    assert done.returncode == 0 and "not tried: transformers has no class" in done.stdout, done.stdout + done.stderr
    read = gptkit_alone("--plugin", str(tmp_path / "own.py"), "load", str(folder))
    assert read.returncode == 0 and "nobody_knows" in read.stdout, read.stdout + read.stderr
    other = checkpoint(tmp_path / "other", {**PLAIN, "hidden_size": 64}, named())
    wrong = gptkit_alone("draft", str(other), "--out", str(tmp_path / "other.py"))
    assert wrong.returncode == 4 and "do not match" in wrong.stderr, wrong.stdout + wrong.stderr


def test_a_plugin_file_that_breaks_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise ValueError('half a file')")
    done = call("--plugin", tmp_path / "own.py", "families", "mistral")
    assert done.exit_code == 0 and "ignored: ValueError: half a file" in done.stderr


def test_roles_are_those_of_the_registry() -> None:
    """A name that no family has is not known, and one that a family alone has goes with it."""
    words, fewer = (
        known_names(),
        known_names(
            (
                "granite",
                "granitemoe",
                "granitemoeshared",
                "granitemoehybrid",
                "granitemoe_swa",
                "granite_swa",
                "hyperclovax",
            )
        ),
    )
    assert words.fields["residual_multiplier"][0].value.role == "branch.multiplier"
    assert "residual_multiplier" not in fewer.fields
    assert words.of_tensor("layers.{layer}.elsewhere.q_proj.weight")[0].value.names == (
        "blocks.{layer}.attention.q_proj.weight",
    )
    assert words.of_tensor("layers.{layer}.wobble.weight") == []


def guessed(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
    """What is guessed of each tensor by its template: the shared names within the layer."""
    draft = guess({**PLAIN, **config}, shapes, None, known_names())
    return {template: tuple(name.rpartition("}.")[2] for name in leaf.names) for template, leaf in draft.leaves.items()}


def test_a_name_that_a_family_has_decides_and_a_matrix_is_no_norm() -> None:
    """The names of ModernBERT's decoder: an encoder is registered that has nearly all of them."""
    layer = {
        **{f"attn.{name}_proj": (32, 32) for name in "qkv"},
        "attn.Wo": (32, 32),
        "attn_norm": (32,),
        "mlp.Wi": (96, 32),
        "mlp.Wo": (32, 48),
        "mlp_norm": (32,),
    }
    ends = {"model.embeddings.tok_embeddings": (97, 32), "model.embeddings.norm": (32,), "model.final_norm": (32,)}
    ends |= {"lm_head.dense": (32, 32), "lm_head.norm": (32,)}
    own = {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    found = guessed({}, {f"{name}.weight": shape for name, shape in (ends | own).items()})
    of_layer = {name.rpartition("{layer}.")[2].removesuffix(".weight"): held for name, held in found.items()}
    assert of_layer["mlp.Wi"] == ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight")
    assert of_layer["mlp.Wo"] == ("feed_forward.down_proj.weight",)
    assert of_layer["mlp_norm"] == ("feed_forward_norm.weight",)
    assert of_layer["attn_norm"] == ("attention_norm.weight",)
    assert of_layer["attn.Wo"] == ("attention.o_proj.weight",)
    assert found["model.embeddings.norm.weight"] == ("embedding.norm.weight",)


def test_a_llama_under_the_names_of_an_older_family_is_no_older_family() -> None:
    """The names of EXAONE 3: GPT-Neo's, but for two matrices, and without GPT-Neo's table of positions."""
    layer = {
        **{f"attn.attention.{name}_proj": (size, 32) for name, size in {"q": 32, "k": 16, "v": 16, "out": 32}.items()},
        "mlp.c_fc_0": (48, 32),
        "mlp.c_fc_1": (48, 32),
        "mlp.c_proj": (32, 48),
        "ln_1": (32,),
        "ln_2": (32,),
    }
    ends = {"transformer.wte": (97, 32), "transformer.ln_f": (32,), "lm_head": (97, 32)}
    own = {f"transformer.h.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    shapes = {f"{name}.weight": shape for name, shape in (ends | own).items()}
    found = guessed({}, shapes)
    assert found["transformer.h.{layer}.mlp.c_fc_0.weight"] == ("feed_forward.gate_proj.weight",)
    assert found["transformer.h.{layer}.mlp.c_fc_1.weight"] == ("feed_forward.up_proj.weight",)
    draft = guess(PLAIN, shapes, None, known_names())
    assert draft.skeleton.family.name != "gpt_neo" and not draft.arguments["learned"]
    assert draft.arguments["rotary"] is not None and draft.arguments["inner"] is GatedFeedForward
    assert any("is the gate projection" in doubt.what for doubt in draft.doubts)


# --- the table of the page --------------------------------------------------------------------------------------------

PAGE = Path(architectures.__file__).parents[1] / "docs" / "howto" / "draft-a-family.md"
ROWS = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+?) \| (\d+) \| (\d+) \|", PAGE.read_text("utf-8"), re.M)


def drafted(kind: str, folder: Path) -> drafts.Drafted:
    """The draft of a tiny random model of transformers' class, with the family taken away where there is one."""
    if kind in REPRESENTATIVES:
        save_hf(REPRESENTATIVES[kind].config, folder / "model")
    else:
        assert saved(kind, folder / "model") is not None
    return drafts.draft(folder / "model", folder / "own.py", without=(kind,) if kind in REPRESENTATIVES else ())


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_is_what_comes_out(row: tuple[str, ...], tmp_path: Path) -> None:
    kind, skeleton, proofs, tried, todo = row
    found = drafted(kind, tmp_path)
    held = ", ".join(each.name for each in found.proofs if each.holds)
    told = "all four" if found.passed and held.count(",") == 3 else held or "none"
    assert (found.skeleton, told, str(found.tried), str(len(found.todo))) == (skeleton, proofs, tried, todo)


def test_the_table_has_ten_of_both() -> None:
    known = [row for row in ROWS if row[0] in REPRESENTATIVES]
    assert len(known) >= 10 and len(ROWS) - len(known) >= 10


DRAFTED = """
import resource, sys
from gptkit.cli import main
sys.argv = ["gptkit", *sys.argv[1:]]
try:
    main()
finally:
    print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""
"""The command in a process of its own, which prints last how many kilobytes it or one of its children had at most."""


@exhaustive
def test_what_config_json_claims_costs_nothing(tmp_path: Path) -> None:
    """Neither layers nor labels by the million are made before it is known that the checkpoint has them."""
    most = {}
    for name, change in {"": {}, "layers": {"num_hidden_layers": 10**7}, "labels": {"num_labels": 10**8}}.items():
        folder = tmp_path / f"model{name}"
        shutil.copytree(Path(drafts.__file__).parents[1] / "samples/llama", folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        done = python("-c", DRAFTED, "draft", folder, "--out", tmp_path / f"out{name}.py", "--without", "llama")
        assert done.returncode == (4 if name == "layers" else 0), done.stderr
        assert name != "layers" or "config.json says num_hidden_layers 10000000, but the" in done.stderr
        most[name] = int(done.stdout.splitlines()[-1])
    assert max(most.values()) < most[""] + 50 * 1024

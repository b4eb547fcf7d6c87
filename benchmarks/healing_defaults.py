"""A table of docs/healing.md: `gptkit heal` as it comes, beside a plain loop that gets the same processor time.

    python benchmarks/healing_defaults.py [--only MODEL] [--bytes 50000] [--out PAGE]

Measured rows are noted in build/healing-defaults.json and not measured again: remove it after a change of heal.

Eight changes of each of three trained models are healed at the default settings. The plain loop is AdamW as torch has
it, on the same windows in the same order and on the same loss, at a constant rate: 3e-4 and 1e-4, of which the better
one counts. The loops advance after every step of heal, to the processor time that heal has used, so that a busy machine
slows all of them alike. All are evaluated here, on all of the held-out text. The samples read the play that comes with
gptkit; stories260K, which is looked for in ../shared/checkpoints, reads stories that it wrote itself.
"""

import argparse
import copy
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kv_starts import written
from torch import Tensor

import gptkit
from gptkit.converter.tokenizer import load_tokenizer
from gptkit.modules import Decoder
from gptkit.modules.cache import Cache
from gptkit.training.data import Stretch, Windows, open_tokens
from gptkit.training.heal import heal
from gptkit.training.loop import TrainingStep
from gptkit.training.options import HELD_OUT
from gptkit.training.parallel import Group
from gptkit.training.train import TextReader, split

PLAY = Path(gptkit.__file__).parent / "samples" / "play.txt"
STORIES = "stories260K-llama"
SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "checkpoints" / STORIES
PLAINLY: dict[str, Any] = {"approximate": True}
LLAMA: dict[str, dict[str, Any]] = {
    "RMSNorm → LayerNorm": {"norm": "layernorm", **PLAINLY},
    "one key-value head": {"attention": "mqa", **PLAINLY},
    "SiLU → GELU": {"activation": "gelu"},
    "one layer dropped": {"layers": "0-2,4"},
    "feed-forward by a quarter": {"intermediate": "192"},
    "parallel blocks": {"block": "parallel"},
    "fewer query heads": {"heads": "4"},
    "width by a sixth": {"hidden": "80"},
}
GPT2: dict[str, dict[str, Any]] = {
    "LayerNorm → RMSNorm": {"norm": "rmsnorm", **PLAINLY},
    "one key-value head": {"attention": "mqa", **PLAINLY},
    "GELU → SiLU": {"activation": "silu"},
    "one layer dropped": {"layers": "0-1,3"},
    "feed-forward by a quarter": {"intermediate": "336"},
    "parallel blocks": {"block": "parallel"},
    "fewer query heads": {"heads": "3"},
    "learned positions → RoPE": {"position": "rope"},
}
CHANGES = {
    "sample:gpt2": GPT2,
    "sample:llama": LLAMA,
    STORIES: {**LLAMA, "feed-forward by a quarter": {"intermediate": "128"}, "width by a sixth": {"hidden": "56"}},
}
RATES = 3e-4, 1e-4
BOUND = 1.03  # of the ratio to the plain loop
LONGEST = 320  # tokens of a story
MARKS = "<!-- healing defaults -->\n", "<!-- end of healing defaults -->"
COLUMNS = ("model", "change", "KL before", "healed", "rate", "plain loop", "its rate", "healed / plain", "processor")
PAGE = """
## At the default settings

This table compares `gptkit heal` with a plain AdamW loop. `heal` gets no option but the teacher and the text. The plain
loop minimises the same loss as `heal` and reads the same windows of the text in the same order. It gets the same
processor time as `heal`, including the trials and evaluations of `heal`. The plain loop takes its turn after every step
of `heal`, so that other work on the machine slows both equally. It runs twice, at constant learning rates of 3e-4 and
1e-4, and the better result is in the table.

*KL before*, *healed* and *plain loop* are KL divergences from the original model, in nats per token on all of the
held-out text: before training, after `heal` and after the plain loop. *Rate* is the learning rate that `heal` chose,
and *its rate* that of the plain loop. *Processor* is the processor time of one of these trainings.

The models gpt2 and llama, small trained models that come with gptkit, read {bytes:,} bytes of a play. stories260K reads
{bytes:,} bytes of text that it generated itself. A run has {least:,} to {most:,} tokens.

{table}

{better} of {rows} healed models are closer to the original than before healing. The column *healed / plain* divides the
KL after `heal` by the KL after the plain loop. {within} of {rows} ratios are {bound:.2f} or less, and the largest is
{worst:.2f}.

The control is the original model, trained on the same text at the learning rate that is best for it. This training
changes the perplexity of the original on the held-out text as follows:

{controls}

`make healing-defaults` writes this section. The figures were measured on one thread with torch {version}.
"""


@dataclass(frozen=True)
class Text:
    """The tokens of a text: the windows to train on, and those held out."""

    folder: Path
    training: Stretch
    held: Windows

    @classmethod
    def of(cls, folder: Path, length: int) -> "Text":
        """Open a folder of tokens, and hold out the same share as `heal`."""
        reader = TextReader(folder, False, Group(0, 1, torch.device("cpu")), None, 0, None, True)
        return cls(folder, *split(open_tokens(folder), HELD_OUT, reader, length, 1, True))

    def divergence(self, teacher: Decoder, model: Decoder) -> float:
        """Return the KL divergence of a model from the teacher on all that is held out."""
        ids = torch.from_numpy(self.held.ids)
        with torch.no_grad():
            return sum(float(divergence(teacher(row[None]), model(row[None]))) for row in ids) / ids.numel()


def divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """Return the KL divergence in nats, summed over all places."""
    wanted, given = (F.log_softmax(each.float(), dim=-1) for each in (wanted, given))
    return F.kl_div(given, wanted, reduction="sum", log_target=True)


class PlainLoop:
    """AdamW at a constant rate, on the same loss and the same windows in the same order as `heal`."""

    def __init__(self, teacher: Decoder, start: Decoder, text: Text, rate: float) -> None:
        self.teacher, self.model, self.text = teacher, copy.deepcopy(start).train(), text
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        self.spent, self.steps = 0.0, 0

    def advance(self, seconds: float, windows: int) -> None:
        """Make steps of `windows` windows until the loop has used this many seconds of the processor in all."""
        while self.spent < seconds:
            began = time.process_time()
            ids = torch.from_numpy(self.text.training.step(self.steps, windows, 0).ids)
            with torch.no_grad():
                wanted = self.teacher(ids)
            (divergence(wanted, self.model(ids)) / ids.numel()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.steps += 1
            self.spent += time.process_time() - began


class Race:
    """Advance the plain loops after every step of `heal`, to the processor time that `heal` has used.

    Turns of milliseconds make the comparison independent of what else the machine does. The time of `heal` is that of
    trials, steps, evaluations and checkpoints, and does not include the control's.
    """

    def __init__(self, loops: list[PlainLoop]) -> None:
        self.loops, self.spent, self.last = loops, 0.0, 0.0

    def begin(self, *_: object) -> None:
        """Start the clock."""
        self.last = time.process_time()

    def tell(self, name: str, step: TrainingStep) -> None:
        """Give every plain loop as much time as `heal` has used up to this step."""
        if "control" not in name:
            self.spent += time.process_time() - self.last
            for loop in self.loops:
                loop.advance(self.spent, round(step.tokens / step.step / self.loops[0].text.held.ids.shape[1]))
        self.last = time.process_time()


@dataclass
class Row:
    """One change: KL divergences on all of the held-out text, what was chosen, and the processor's seconds."""

    model: str
    change: str
    before: float
    healed: float
    rate: float
    tokens: int
    plain: dict[str, float]
    """Of the plain loop, by its rate."""
    seconds: float
    control: tuple[float, float] | None
    """The perplexities of the original and of the control, of the first change of a model."""

    @property
    def ratio(self) -> float:
        return self.healed / min(self.plain.values())

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        best = min(self.plain, key=lambda each: self.plain[each])
        return [
            self.model, self.change, f"{self.before:.5f}", f"{self.healed:.5f}", f"{self.rate:.1e}",
            f"{self.plain[best]:.5f}", best, f"{self.ratio:.2f}", f"{self.seconds:.0f} s",
        ]  # fmt: skip


def change(name: str, what: str, path: str, text: Text, folder: Path) -> Row:
    """Heal one change and run the plain loops. The control of a model runs with its first change."""
    swap = dict(CHANGES[name][what])
    if not name.startswith("sample:") and not swap.get("approximate"):
        swap["calibrate"] = folder / "text.txt"
    gptkit.swap(path, folder / "changed", **swap, measured=False, force=True)
    teacher, start = (gptkit.load(each, "float32") for each in (path, folder / "changed"))
    loops = {f"{rate:.0e}": PlainLoop(teacher, start, text, rate) for rate in RATES}
    first, race = what == next(iter(CHANGES[name])), Race(list(loops.values()))
    done = heal(
        folder / "changed", path, text.folder, folder / "healed",
        beside="control" if first else False, force=True, on_start=race.begin, tell=race.tell,
    )  # fmt: skip
    healed = gptkit.load(folder / "healed", "float32")
    before, after = (text.divergence(teacher, each.eval()) for each in (start, healed))
    plain = {rate: text.divergence(teacher, loop.model.eval()) for rate, loop in loops.items()}
    control = None if done.control is None else (done.original.perplexity, done.control.perplexities[0])
    model = name.removeprefix("sample:")
    return Row(model, what, before, after, done.healed.rate, done.tokens, plain, race.spent, control)


def write_stories(model: str, path: Path, size: int) -> None:
    """Let a model write at least `size` characters of text, 64 stories at once, by plain sampling."""
    decoder, generator, texts = gptkit.load(model, "float32").eval(), torch.Generator().manual_seed(0), list[str]()
    coder = load_tokenizer(Path(model))
    assert coder is not None
    begins, ends = 1, coder.eos_ids
    with torch.inference_mode():
        while sum(map(len, texts)) < size:
            ids, cache, rows = torch.full((64, 1), begins), Cache(decoder.spec), list[Tensor]()
            for _ in range(LONGEST):
                ids = torch.multinomial(decoder(ids, cache=cache)[:, -1].softmax(-1), 1, generator=generator)
                rows.append(ids)
            for row in torch.cat(rows, dim=1).tolist():
                end = next((place for place, token in enumerate(row) if token in (begins, *ends)), len(row))
                texts.append(coder.decode(row[:end], skip_special_tokens=True).strip())
    path.write_text("\n\n".join(texts)[:size])


def opened(name: str, path: str, size: int, folder: Path) -> Text:
    """Make the text of a model in a folder, and its tokens."""
    text = folder / "text.txt"
    if name.startswith("sample:"):
        text.write_bytes(PLAY.read_bytes()[:size])
    else:
        write_stories(path, text, size)
    gptkit.tokenize([text], folder / "tokens", tokenizer=path)
    teacher = gptkit.load(path, "float32")
    found = Text.of(folder / "tokens", min(1024, teacher.spec.context_length or 1024))
    PlainLoop(teacher, teacher, found, 1e-5).advance(0.1, 1)  # what torch does only once is not part of the first row
    return found


def measured(models: dict[str, str], size: int, notes: Path) -> list[Row]:
    """Measure all changes of some models that the notes do not have, and note each. The models take turns."""
    rows = [Row(**each) for each in json.loads(notes.read_text())] if notes.is_file() else []
    with tempfile.TemporaryDirectory() as temporary:
        texts: dict[str, Text] = {}
        for number in range(max(map(len, CHANGES.values()))):
            for name, path in models.items():
                what, folder = list(CHANGES[name])[number], Path(temporary) / name.replace(":", "-")
                if (name.removeprefix("sample:"), what) in [(row.model, row.change) for row in rows]:
                    continue
                if name not in texts:
                    folder.mkdir()
                    texts[name] = opened(name, path, size, folder)
                rows.append(change(name, what, path, texts[name], folder))
                notes.parent.mkdir(parents=True, exist_ok=True)
                notes.write_text(json.dumps([asdict(row) for row in rows]))
                print("  ".join(rows[-1].cells()), flush=True)
    names = [name.removeprefix("sample:") for name in models]
    return sorted((row for row in rows if row.model in names), key=lambda row: names.index(row.model))


def main() -> None:
    """Run them all, and put the section into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CHANGES))
    parser.add_argument("--bytes", type=int, default=50_000)
    parser.add_argument("--stories", type=Path, default=SHARED, help="the folder of stories260K")
    parser.add_argument(
        "--notes", type=Path, default=Path("build/healing-defaults.json"), help="rows that are measured"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: name if name.startswith("sample:") else str(options.stories) for name in CHANGES}
    if options.only:
        models = {options.only: models[options.only]}
    if STORIES in models and not options.stories.is_dir():
        print(f"{STORIES} is left out: there is no {options.stories}", flush=True)
        del models[STORIES]
    rows = measured(models, options.bytes, options.notes)
    controls = [
        f"- {row.model}: perplexity {row.control[0]:.2f} before, {row.control[1]:.2f} after"
        for row in rows
        if row.control
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    page = PAGE.format(
        bytes=options.bytes,
        least=min(row.tokens for row in rows),
        most=max(row.tokens for row in rows),
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        controls="\n".join(controls),
        better=sum(row.healed < row.before for row in rows),
        rows=len(rows),
        within=sum(row.ratio <= BOUND for row in rows),
        bound=BOUND,
        worst=max(row.ratio for row in rows),
        version=torch.__version__,
    )
    print(page)
    if options.out is not None:
        written(options.out, MARKS[0] + page + MARKS[1], *MARKS)


if __name__ == "__main__":
    main()

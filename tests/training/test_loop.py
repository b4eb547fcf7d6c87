"""The optimiser's groups, the schedule, a step's gradient, and documents that lie in one row."""

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gptkit.errors import NoNumber, UsageError
from gptkit.modules.decoder import Decoder, positions_in
from gptkit.modules.load import load
from gptkit.training.data import NOWHERE, Windows
from gptkit.training.loop import FLOOR, Run, Settings, TrainingStep, _Engine, adamw, decays, fit, next_token, rate_at
from gptkit.training.parallel import Group
from gptkit.training.state import Store

ALONE = Group(0, 1, torch.device("cpu"))


def windows(model: Decoder, rows: int, length: int, seed: int = 0) -> Windows:
    ids = np.random.default_rng(seed).integers(0, model.spec.vocab_size, (rows, length + 1))
    targets = ids[:, 1:].copy()
    targets[::2, : length // 2] = NOWHERE  # parts with fewer targets than others
    return Windows(ids[:, :-1].copy(), targets, None)


# --- the optimiser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon"])
def test_matrices_alone_decay(name: str) -> None:
    model = load(f"sample:{name}")
    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    optimiser = adamw(model, model.spec.parameters(), 1e-3, 0.1)
    found = {
        group["weight_decay"]: {names[each.data_ptr()] for each in group["params"]} for group in optimiser.param_groups
    }
    assert set(found) == {0.1, 0.0} and found[0.1] | found[0.0] == set(names.values())
    declared = {each.name: each for each in model.spec.parameters()}
    assert all(name.endswith("proj.weight") or name == "head.weight" for name in found[0.1])
    assert all(len(declared[name].shape) == 1 or declared[name].role == "table" for name in found[0.0])
    assert {name for name, each in declared.items() if decays(each)} == found[0.1]


def test_what_is_not_trained_is_frozen() -> None:
    model = load("sample:llama")
    norms = {name for name, _ in model.named_parameters() if "norm" in name}
    (group,) = adamw(model, model.spec.parameters(), 1e-3, 0.1, trained=norms).param_groups
    assert len(group["params"]) == len(norms)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == norms


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    assert [rate_at(done, 2.0, 0.2) for done in (0.05, 0.1, 0.2)] == pytest.approx([0.5, 1.0, 2.0])
    assert rate_at(0.6, 2.0, 0.2) == pytest.approx(2.0 * (FLOOR + 1) / 2)
    assert rate_at(1.0, 2.0, 0.2) == rate_at(1.5, 2.0, 0.2) == pytest.approx(0.2)
    assert rate_at(0.0, 2.0, 0.0) == 2.0
    rates = [rate_at(done / 100, 2.0, 0.2) for done in range(20, 101)]
    assert rates == sorted(rates, reverse=True)
    assert [rate_at(done, 2.0, 0.2, constant=True) for done in (0.1, 0.2, 0.6, 1.0, 1.5)] == [1.0, 2.0, 2.0, 2.0, 2.0]


def engines(settings: Settings) -> list[_Engine]:
    """One that reads its numbers before it changes parameters, and one that does so last, as on a GPU."""
    made = []
    for reads_last in (False, True):
        model = load("sample:llama", "float32").train()
        engine = _Engine(model, next_token, adamw(model, model.spec.parameters(), 1e-3, 0.1), settings, ALONE)
        assert not engine.reads_last  # on a CPU
        engine.reads_last = reads_last
        made.append(engine)
    return made


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_a_step_is_the_same_where_its_numbers_are_read_last(clip: float) -> None:
    ends = []
    for engine in engines(Settings(4, 12, steps=3, clip=clip, accumulate=2)):
        told = [engine.step(number, windows(engine.model, 4, 12, number), 1e-3) for number in range(3)]
        ends.append((told, dict(engine.model.named_parameters())))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(each, ends[1][1][name]) for name, each in ends[0][1].items())


@pytest.mark.parametrize("where", ["loss", "gradient", "parameter"])
def test_no_number_reaches_a_parameter_where_numbers_are_read_last(where: str) -> None:
    said = []
    for engine in engines(Settings(4, 12, steps=3)):
        engine.step(0, windows(engine.model, 4, 12), 1e-3)
        if where == "parameter":
            engine.model.blocks[0].feed_forward.up_proj.weight.data[0, 0] = math.nan
        elif where == "loss":
            engine.loss = lambda model, batch: next_token(model, batch) * math.inf
        else:
            inner = engine.model.final_norm.weight
            inner.register_hook(lambda gradient: gradient * math.inf)
        before = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
        with pytest.raises(NoNumber) as caught:
            engine.step(1, windows(engine.model, 4, 12), 1e-3)
        said.append(str(caught.value))
        after = dict(engine.model.named_parameters())
        assert all(torch.equal(each.nan_to_num(9), after[name].nan_to_num(9)) for name, each in before.items())
    assert said[0] == said[1]


def test_a_run_on_time_has_a_rate_from_its_first_step_on() -> None:
    settings = Settings(1, 8, seconds=100.0, warmup=0.5)
    assert 0 < rate_at(Run().done(settings, ahead=1), 1.0, settings.warmup) < 0.01
    assert Run(step=4, seconds=8.0).done(settings, ahead=1) == pytest.approx(0.1)
    assert Run(step=4, seconds=8.0).done(settings) == 0.08


@pytest.mark.parametrize("rate", [0.3, 1e-3])
def test_a_run_that_waits_for_a_better_one_ends_as_the_best(tmp_path: Path, rate: float) -> None:
    """Which is the beginning, of a model that a high rate spoils; wherever it was stopped."""
    model = load("sample:llama", "float32")
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    read = [windows(model, 4, 12) for _ in range(2)]
    settings = Settings(4, 12, steps=9, rate=rate, warmup=0, every=2, patience=2)
    ends = []
    for stop in (None, 3):
        tuned, store = load("sample:llama", "float32"), Store(tmp_path / f"{stop}", ALONE)
        store.folder.mkdir()

        def tell(step: TrainingStep, stop: int | None = stop) -> None:
            if step.step == stop:
                raise RuntimeError("enough")

        given: dict[str, Any] = {"group": ALONE, "store": store}
        if stop is not None:
            with pytest.raises(RuntimeError):
                fit(tuned, lambda _: read[0], read[1], settings, **given, tell=tell)
            tuned = load("sample:llama", "float32")
        run = fit(tuned, lambda _: read[0], read[1], settings, **given)
        losses = [each["held_out"] for each in run.curve]
        engine = _Engine(tuned, next_token, torch.optim.SGD(tuned.parameters()), settings, ALONE)
        assert engine.evaluate(run.step, read[1]) == min(losses)
        ends.append((losses, {name: each.detach().clone() for name, each in tuned.named_parameters()}))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(each, ends[1][1][name]) for name, each in ends[0][1].items())
    spoilt = rate == 0.3
    assert (len(losses) == 3) is spoilt and (losses.index(min(losses)) == 0) is spoilt
    assert all(torch.equal(each, before[name]) for name, each in ends[0][1].items()) is spoilt


def noisy(folder: Path, stop: int | None) -> tuple[Run, Decoder, list[dict[str, Tensor]]]:
    """Train with noisy steps, stopped and resumed after one of them. Return the parameters after every step too."""
    settings = Settings(2, 12, steps=30, rate=0.01, warmup=0, every=30, averaged=True)
    model, store, seen = load("sample:llama", "float32"), Store(folder, ALONE), list[dict[str, Tensor]]()
    text = [windows(model, 2, 12, seed) for seed in range(31)]

    def tell(step: TrainingStep) -> None:
        seen.append({name: each.detach().clone() for name, each in model.named_parameters()})
        if step.step == stop:
            signal.raise_signal(signal.SIGINT)

    given: dict[str, Any] = {"group": ALONE, "store": store, "keep_best": True, "tell": tell}
    folder.mkdir()
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            fit(model, lambda step: text[step], text[30], settings, **given)
        model = load("sample:llama", "float32")
    run = fit(model, lambda step: text[step], text[30], settings, **given)
    engine = _Engine(model, next_token, torch.optim.SGD(model.parameters()), settings, ALONE)
    assert engine.evaluate(30, text[30]) == run.curve[-1]["averaged"]
    return run, model, seen


def test_a_run_ends_as_the_average_of_its_steps_where_that_is_better(tmp_path: Path) -> None:
    """It is the average by the formula, and a run that was stopped ends with the same bits."""
    run, model, seen = noisy(tmp_path / "whole", None)
    assert [entry["averaged"] is None for entry in run.curve] == [True, False]
    assert run.ends_averaged and run.curve[-1]["averaged"] < run.curve[-1]["held_out"]
    weights = [0.0] * 30  # of each step in the average
    for step in range(1, 31):
        weights = [weight * (step - 1) / (step + 3) for weight in weights]
        weights[step - 1] = 4 / (step + 3)
    for name, each in model.named_parameters():
        wanted = sum(weight * state[name].double() for weight, state in zip(weights, seen, strict=True))
        assert torch.allclose(each.double(), wanted, rtol=1e-4, atol=1e-6)
    for stop in (7, 30):
        _, again, _ = noisy(tmp_path / f"{stop}", stop)
        ends = dict(again.named_parameters())
        assert all(torch.equal(each, ends[name]) for name, each in model.named_parameters())


def test_a_run_ends_as_its_last_step_where_the_average_is_behind(tmp_path: Path) -> None:
    """As long as every step makes the model better, an average of earlier steps is worse."""
    model, store = load("sample:llama", "float32"), Store(tmp_path, ALONE)
    read = windows(model, 4, 12)
    run = fit(
        model, lambda _: read, read, Settings(4, 12, steps=12, rate=1e-4, warmup=0, every=12, averaged=True),
        group=ALONE, store=store, keep_best=True,
    )  # fmt: skip
    assert not run.ends_averaged and run.curve[-1]["held_out"] < run.curve[-1]["averaged"] < run.curve[0]["held_out"]
    engine = _Engine(model, next_token, torch.optim.SGD(model.parameters()), Settings(4, 12), ALONE)
    assert engine.evaluate(12, read) == run.curve[-1]["held_out"]


# --- a step -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_parts_add_up_to_the_large_batch(clip: float) -> None:
    """By what a step of plain descent takes from the parameters, which is the gradient."""
    taken = []
    for accumulate in (1, 3, 8):
        model = load("sample:llama", "float64").train()
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        batch = windows(model, 8, 12)
        descent = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = Settings(8, 12, steps=1, accumulate=accumulate, clip=clip)
        loss, norm = _Engine(model, next_token, descent, settings, ALONE).step(0, batch, 1.0)
        taken.append({name: before[name] - each.detach() for name, each in model.named_parameters()})
        logits = load("sample:llama", "float64")(torch.from_numpy(batch.ids))
        mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        assert loss == pytest.approx(float(mean.detach()), rel=1e-6)  # summed over parts in fp32
        whole = math.sqrt(sum(float(each.square().sum()) for each in taken[-1].values()))
        assert whole == pytest.approx(min(norm, clip) if clip else norm, rel=1e-3)
    for other in taken[1:]:
        for name, gradient in taken[0].items():
            assert torch.allclose(gradient, other[name], rtol=0, atol=1e-12 * float(gradient.abs().max())), name


# --- documents in one row ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon"])
def test_a_document_does_not_see_another(name: str, attention: str) -> None:
    """Within fp64's rounding; a bias of ALiBi is rounded to fp32, and is another number by the same constant."""
    model = load(f"sample:{name}", "float64", attention)
    lengths = (9, 14, 5)
    ids = torch.randint(0, model.spec.vocab_size, (2, sum(lengths)), generator=torch.Generator().manual_seed(0))
    numbers = torch.repeat_interleave(torch.tensor([4, 5, 9]), torch.tensor(lengths)).expand(2, -1)
    with torch.no_grad():
        packed = model(ids, documents=numbers)
        alone = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
        together = model(ids)
    bound = (1e-5 if name == "bloom" else 1e-12) * float(alone.abs().max())
    assert float((packed - alone).abs().max()) < bound
    assert float((together - alone)[:, 9:].abs().max()) > 1000 * bound
    assert positions_in(numbers)[0].tolist() == [*range(9), *range(14), *range(5)]


def test_documents_go_with_no_cache_or_mask(tmp_path: Path) -> None:
    model, ids = load("sample:llama"), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(UsageError, match="documents must have the shape"):
        model(ids, documents=ids[:, :2])
    with pytest.raises(UsageError, match="documents cannot be combined"):
        model(ids, documents=ids, attention_mask=ids)


def test_training_mode_keeps_the_parameters_memory() -> None:
    """Whoever holds it writes there: an optimiser, or the shares of several processes."""
    model = load("sample:bloom").train()
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        trained = model(ids)
    assert before == {name: each.data_ptr() for name, each in model.named_parameters()}
    with torch.no_grad():
        assert torch.equal(trained, model.eval()(ids))

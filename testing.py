"""The four tests of the definition of a model family, for gptkit's own families and for those of plugins.

1. `fields_are_accounted_for`: every field of the reference's config is read, refused, or irrelevant with a reason;
2. `elements_land_once`: every element of a checkpoint is used exactly once, and converting back restores it;
3. `names_and_shapes_agree`: the component tree, gptkit's modules and the reference have the same names and shapes;
4. `logits_agree`: with random parameters, the logits equal the reference's to the last bit.

`assert_same_function` is for tests of your own code: it compares a torch module with a checkpoint as transformers loads
it. The pytest plugin (`gptkit.pytest_plugin`) offers it as a fixture.

The four tests raise AssertionError if the definition is wrong. A reference is a torch module whose parameters have the
names of the checkpoint, and whose result has `logits`. `reference` builds the one that a family defines
(`Architecture.model`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .architectures import Architecture, named
from .components import ModelSpec
from .modules.decoder import Decoder
from .parity.outputs import outputs_of
from .parity.port import Port, verify_port
from .parity.probe import ProbeBatch as Probe
from .parity.sides import auto_class, own_reference, quiet

__all__ = [
    "Probe",
    "assert_same_function",
    "decoder_of",
    "elements_land_once",
    "fields_are_accounted_for",
    "largest_difference",
    "logits_agree",
    "names_and_shapes_agree",
    "probes",
    "randomised",
    "reference",
    "stored",
    "tiny_checkpoint",
]

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


def fields_are_accounted_for(family: Architecture, configs: Iterable[Config], fields: Iterable[str]) -> None:
    """Assert that the definition of a family reads or declares every field of the reference's config.

    A field is declared if the family lists it as irrelevant or refused. No field may be both read and declared.

    Args:
        family: the definition.
        configs: examples of config.json. A field is read if the family reads it for one of them.
        fields: the names of the fields.
    """
    read: set[str] = set()
    for config in configs:
        reader = family.reader(config)
        family.read(reader)
        read |= reader.used
    irrelevant, refused = family.ignored, family.refusals
    missing = sorted(set(fields) - read - irrelevant.keys() - refused.keys())
    assert not missing, f"the family neither reads these fields nor declares them irrelevant or refused: {missing}"
    assert not read & irrelevant.keys(), (
        f"the family reads these fields, but declares them irrelevant: {sorted(read & irrelevant.keys())}"
    )
    both = refused.keys() & (read | irrelevant.keys())
    assert not both, f"the family refuses these fields, but also reads them or declares them irrelevant: {sorted(both)}"
    reasons = [*irrelevant.values(), *(reason for _, reason in refused.values())]
    short = [reason for reason in reasons if len(reason.split()) < 2 and reason not in ("generation", "tokenizer")]
    assert not short, f"these reasons are shorter than two words: {short}"


def elements_land_once(family: Architecture, config: Config) -> None:
    """Assert that every element of a checkpoint is used exactly once in gptkit's tensors.

    Converting these tensors back must restore the checkpoint's tensors bit for bit.
    """
    spec = family.spec(config)
    landed: dict[str, np.ndarray[Any, Any]] = {}
    start = 0
    for leaf in family.bind(spec):
        count = int(np.prod(leaf.shape))
        source = np.arange(start, start + count, dtype=np.int64).reshape(leaf.shape)
        start += count
        shared = leaf.to_shared(source)
        assert tuple(array.shape for array in shared) == leaf.shared_shapes
        back = leaf.to_checkpoint(shared)
        assert (back.shape, back.dtype) == (source.shape, source.dtype)
        assert back.tobytes() == source.tobytes(), leaf.checkpoint
        assert not landed.keys() & set(leaf.shared)
        landed.update(zip(leaf.shared, shared, strict=True))
    everything = np.concatenate([array.reshape(-1) for array in landed.values()])
    assert np.array_equal(np.sort(everything), np.arange(start))
    assert {name: array.shape for name, array in landed.items()} == {p.name: p.shape for p in spec.parameters()}
    assert start == sum(parameter.count for parameter in spec.parameters())


def names_and_shapes_agree(family: Architecture, config: Config, theirs: Shapes) -> None:
    """Assert that gptkit expects the tensor names and shapes that the reference's checkpoint has.

    Also assert that gptkit's torch modules have the names and shapes of the parameters in the component tree.

    Args:
        family: the definition.
        config: an example of config.json.
        theirs: the shapes in the reference's checkpoint, by name. They may include those of a tied head.
    """
    spec = family.spec(config)
    ours = {leaf.checkpoint: leaf.shape for leaf in family.bind(spec)}
    assert ours == stored(family, spec, theirs)
    with torch.device("meta"):
        decoder = Decoder(spec)
    modules = {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}
    assert modules == {parameter.name: parameter.shape for parameter in spec.parameters()}


def stored(family: Architecture, spec: ModelSpec, theirs: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the reference's tensors that gptkit's model has too, by name.

    `theirs` has the shapes of all tensors of the reference's checkpoint. The result leaves out tied tensors, and
    tensors that gptkit only copies between checkpoints.
    """
    drop = {*family.borrowed(spec), *((family.head,) if spec.tied else ())}
    own = {leaf.checkpoint for leaf in family.bind(spec)}
    carried = {name for name in theirs if name not in own and family.carries(name, len(spec.blocks))}
    return {name: shape for name, shape in theirs.items() if name not in drop and name not in carried}


def probes(length: int, batch: int, paddings: tuple[str, ...], vocabulary: int) -> Iterator[Probe]:
    """Yield test inputs: a batch of random token ids without padding, and one for each side of padding.

    Args:
        length: the number of tokens of a sequence.
        batch: the number of sequences. Later ones have more padding.
        paddings: the sides, "left" and "right".
        vocabulary: the vocabulary size.
    """
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    yield Probe(f"T={length} B={batch}", ids)
    for side in paddings if batch > 1 and length > 1 else ():
        mask = torch.ones_like(ids)
        for row in range(1, batch):
            padding = row * length // 4
            mask[row, slice(padding) if side == "left" else slice(length - padding, None)] = 0
        yield Probe(f"T={length} B={batch} padded {side}", ids, mask)


def reference(
    family: Architecture, config: Config, dtype: torch.dtype = torch.float32, attention: str = "eager"
) -> Any:
    """Return the reference model that the family defines. Its weights are not set."""
    model = own_reference({**config, "model_type": family.model_types[0]}, dtype, attention)
    assert model is not None, f"{family.name} does not define its own reference model (Architecture.model)"
    return model.eval()


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set all parameters to random values. The usual initialisation would hide tensors (norms are 1, biases 0)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    return model


def decoder_of(
    family: Architecture, config: Config, weights: Mapping[str, Tensor], attention: str = "eager"
) -> Decoder:
    """Return gptkit's model of a config, with the weights of a checkpoint in their dtype."""
    spec = family.spec(config)
    shared: dict[str, Tensor] = {}
    for leaf in family.bind(spec):
        shared.update(zip(leaf.shared, leaf.to_shared(weights[leaf.checkpoint]), strict=True))
    decoder = Decoder(spec, attention=attention)  # type: ignore[arg-type]
    decoder = decoder.to(next(iter(weights.values())).dtype).eval()
    decoder.load_state_dict(shared)
    return decoder


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference, or NaN if `ours` has one. All values of `theirs` must be finite."""
    assert theirs.dtype in (ours.dtype, torch.float32)  # Mamba returns fp32 logits
    assert ours.shape == theirs.shape
    assert bool(theirs.isfinite().all())
    return (ours.double() - theirs.double()).abs().max().item()


def logits_agree(model: Callable[..., Any], decoder: Decoder, batches: Iterable[Probe]) -> None:
    """Assert that the decoder's logits of real tokens equal the reference's to the last bit."""
    worst = {}
    with torch.inference_mode():
        for probe in batches:
            ours, theirs = outputs_of(decoder, probe), outputs_of(model, probe)
            if probe.attention_mask is not None:
                ours, theirs = (logits[probe.attention_mask.bool()] for logits in (ours, theirs))
            worst[probe.name] = largest_difference(ours, theirs)
    assert worst, "there was no batch to compare"
    assert {name: difference for name, difference in worst.items() if difference != 0} == {}


def assert_same_function(model: Port, reference: str | Path, *, long: bool = False, offline: bool = True) -> None:
    """Assert that your own implementation of a model computes the same logits as transformers.

    The implementation gets token ids (B, T), and returns logits (B, T, vocabulary). A difference that rounding to fp32
    explains is allowed; see `gptkit.verify`. If the logits differ by more, the AssertionError names the first component
    that differs, and the mistake that explains the difference.

    Args:
        model: a torch module with the weights of the reference, a function that returns one, or the name of such a
            function, `package.module:callable`. The module is copied, not changed.
        reference: the checkpoint: a folder, a Hugging Face id, or a sample such as "sample:llama".
        long: also compare texts that are longer than the sliding windows or the original context of the model.
        offline: use only local files and the cache of the hub.

    Raises:
        AssertionError: the functions are different.
        GptkitError: the checkpoint cannot be read, or the implementation raises or returns something else than logits.
    """
    __tracebackhide__ = True
    result = verify_port(reference, model, long=long, offline=offline, mutations=False)
    if result.verdict == "different":
        raise AssertionError(_diagnosis(result))


def _diagnosis(result: Any) -> str:
    """Return the report of a verification as text with lines of at most 100 characters."""
    from rich.console import Console

    from .report.verification import port_report

    text = StringIO()
    Console(file=text, width=100, color_system=None).print(port_report(result))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def tiny_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a small checkpoint of a family with random weights, as transformers saves it, and return its folder.

    All parameters are random, also norms and biases. The same seed gives the same checkpoint. The vocabulary has 97
    tokens, and there is no tokenizer.

    Args:
        family: the name of the family, such as "llama"; `gptkit families` lists them.
        folder: where to write the files.
        seed: draws the sizes and the weights.

    Raises:
        UnknownFamily: gptkit has no family of this name.
    """
    import transformers

    config = named(family).drawn(seed)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = auto_class(config).from_config(transformers.AutoConfig.for_model(**config))
        randomised(model, seed).save_pretrained(folder)  # type: ignore[operator]
    return folder

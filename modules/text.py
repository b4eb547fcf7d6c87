"""Generate text with a checkpoint, or with a model in memory."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from ..analysis.activations import Kernel
from ..components import ModelSpec
from ..converter.checkpoint import Checkpoint, open_checkpoint
from ..converter.opening import Opening
from ..converter.outline import Outline
from ..converter.tokenizer import StreamDecoder, Tokenizer, eos_ids, load_tokenizer, start_id
from ..converter.tree import Origin
from ..errors import UsageError
from ..signatures import takes
from .decoder import Decoder
from .devices import Devices
from .generate import Beams, Sampling, outside_vocabulary, warn
from .generate import generate as generate_tokens
from .load import load_checkpoint
from .steps import Caching

_WARNED = partial(warn, stacklevel=4)  # a warning that points to the code that asks for the next piece


@takes(Opening)
def generate(
    model: str | Path | Checkpoint | Decoder,
    prompt: str | Sequence[int],
    max_new_tokens: int = 100,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    beams: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    dtype: torch.dtype | str | None = None,
    attention: Kernel = "sdpa",
    device: Devices | None = None,
    stop_at_eos: bool = True,
    allow_extra: bool = False,
    cache: Caching = "dynamic",
    tell: Callable[[str], None] = _WARNED,
    **opening: Unpack[Opening],
) -> Iterator[str]:
    """Yield the continuation of a prompt, piece by piece, without the prompt itself.

    A model with an encoder reads the prompt as its source, and the result is the text that its decoder writes.

    Args:
        model: a checkpoint (a folder, a file or a repository on the hub), an opened checkpoint, or a model that `load`
            returned. The tokenizer is that of the checkpoint.
        prompt: a text, or token ids. A checkpoint without a tokenizer needs token ids, and the result is then ids
            separated by spaces.
        max_new_tokens: the largest number of tokens to generate.
        temperature: the number that logits are divided by; 0 always takes the most likely token. By default 0, or 1 if
            top_k or top_p is given.
        top_k: sample only from the k most likely tokens.
        top_p: sample only from the smallest set of most likely tokens whose probabilities reach this sum.
        seed: the seed of the sampling; the same seed gives the same text.
        beams: the number of beams of a beam search, which does not sample and yields the best text at its end.
        length_penalty: the exponent of the length by which a beam's log-probability is divided.
        early_stopping: end the beam search when there are as many complete texts as beams.
        dtype: the dtype to compute in; by default the checkpoint's. A model in memory computes in its own dtype.
        attention: "sdpa" or "eager", for a checkpoint. A model in memory uses its own.
        device: where to compute: "cpu", "cuda", "cuda:1", "mps", or by default "auto", a GPU if there is one. Several
            devices divide the layers among them, as in `load`. A model in memory computes on its own device.
        stop_at_eos: stop when the model generates its end-of-text token.
        offline, allow_pickle: see `Opening`.
        allow_extra: leave out tensors that have no place in the model instead of refusing them.
        cache: the kind of KV cache. "auto" is static on a CUDA device, where gptkit records the model's step as a CUDA
            graph, if the step can be recorded; see `modules.generate.generate`. The default is "dynamic".
        tell: called with a sentence when the text reaches a limit of the model: the end of its position table, or of a
            rotary model's context. By default the sentence is a UserWarning.

    Raises:
        InvalidInput, Offline: as in `open_checkpoint`.
        UsageError: the prompt is a text and there is no tokenizer; the prompt is empty or too long; a sampling value is
            out of range; `dtype` or `device` was given for a model in memory; the device is unknown; a static cache was
            asked for with beams, or for a model whose cache has no fixed size.
    """
    if temperature is None:
        temperature = 0.0 if top_k is None and top_p is None else 1.0
    sampling = Sampling(temperature, top_k, top_p, seed)
    if beams is None and (length_penalty != 1.0 or early_stopping):
        raise UsageError(
            "length_penalty and early_stopping work only with beam search", "Pass beams as well, such as beams=4."
        )
    search = None if beams is None else Beams(beams, length_penalty, early_stopping)
    if isinstance(model, Decoder):
        if dtype is not None or device is not None or attention != "sdpa":
            raise UsageError(
                "generate accepts dtype, device and attention only with the name of a model, but this model is already "
                "loaded",
                "Convert it with model.to(dtype) or model.to(device), or choose attention in gptkit.load.",
            )
        about = model.source or Outline(model.spec, Origin())
        tokenizer = None
        if about.path is not None or "tokenizer.json" in about.texts:
            tokenizer = load_tokenizer(about.path or Path(), about.texts)
        ids = _prompt_ids(about.origin.reference or "the model in memory", model.spec, tokenizer, prompt)
        stop = tokenizer.eos_ids if tokenizer is not None else _stated_eos(about.origin)
        decoder, start = model, start_id(about.path or Path(), about.origin.config, about.texts)
    else:
        checkpoint = (
            model if isinstance(model, Checkpoint) else open_checkpoint(model, allow_extra=allow_extra, **opening)
        )
        tokenizer = load_tokenizer(checkpoint.folder, checkpoint.texts)
        ids = _prompt_ids(checkpoint.reference, checkpoint.spec, tokenizer, prompt)
        folder, texts = checkpoint.folder, checkpoint.texts
        stop = eos_ids(folder, None, texts) if tokenizer is None else tokenizer.eos_ids
        if not stop and checkpoint.format != "hf":  # from the config.json of the checkpoint it was converted from
            stop = _stated_eos(checkpoint.origin)
        decoder = load_checkpoint(checkpoint, dtype, attention, device=device)
        start = start_id(folder, checkpoint.origin.config, texts)
    start = None if decoder.encoder is None else start
    chosen: Any = {"sampling": sampling, "beams": search, "stop": stop if stop_at_eos else (), "cache": cache}
    tokens = generate_tokens(decoder, ids, max_new_tokens, start=start, tell=tell, **chosen)
    return _pieces(tokens, tokenizer, ids if decoder.encoder is None else [] if start is None else [start])


def _prompt_ids(name: str, spec: ModelSpec, tokenizer: Tokenizer | None, prompt: str | Sequence[int]) -> list[int]:
    """Return the token ids of a prompt.

    Raises UsageError if the prompt is a text and there is no tokenizer. The message calls the model `name`.
    """
    if not isinstance(prompt, str):
        return list(prompt)
    if tokenizer is None:
        raise UsageError(f"{name} has no tokenizer", "Give token ids instead of a text: --ids '1 5 9'")
    ids = tokenizer.encode(prompt)
    if outside := [token for token in ids if token >= spec.vocab_size]:
        raise outside_vocabulary(outside, spec.vocab_size, "Check that the tokenizer belongs to this model.")
    return ids


def _stated_eos(origin: Origin) -> Sequence[int]:
    value = (origin.config or {}).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def _pieces(ids: Iterator[int], tokenizer: Tokenizer | None, prompt: Sequence[int]) -> Iterator[str]:
    if tokenizer is None:
        for token in ids:
            yield f"{token} "
        return
    # The decoder reads the prompt first, so that a space at the beginning of the continuation is not lost.
    stream = StreamDecoder(tokenizer, skip_special_tokens=True, prompt=prompt)
    for token in ids:
        yield stream.push(token)
    yield stream.finish()

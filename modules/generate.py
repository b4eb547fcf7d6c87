"""Decoding with the KV cache: greedy, sampled, or by beam search.

The filters, their order, sampling and the search are those of transformers. Greedy decoding and beam search therefore
give the same token ids as transformers, and so does sampling with the same seed on the same device.
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from ..components import DynamicScaling, LongRopeScaling, ModelSpec, Rotary
from ..components.ranges import some_of
from ..errors import GptkitError, UsageError
from .cache import Cache
from .decoder import Decoder
from .steps import Caching, Options, Steps

_NEVER = -1e9  # added to the log-probabilities of tokens that must not be chosen
_SMALLEST_TEMPERATURE = 1e-6  # below it, logits divided by it may leave fp32's range


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen from the logits.

    Raises:
        UsageError: a value is out of range, or greedy decoding is combined with a filter, which would do nothing.
    """

    temperature: float = 0.0
    """The logits are divided by it. 0 always chooses the most likely token (greedy decoding)."""
    top_k: int | None = None
    """Only the k most likely tokens may be chosen, and tokens that tie with the last of them."""
    top_p: float | None = None
    """After top_k, only the smallest set of tokens whose probabilities reach p may be chosen (1904.09751)."""
    seed: int | None = None
    """The seed of the random numbers. None uses one from the operating system."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise UsageError(f"the temperature must be 0 (greedy) or more, not {self.temperature}")
        if 0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise UsageError(
                f"the temperature {self.temperature} is too small: logits divided by it would be infinite",
                "Use 0 for greedy decoding.",
            )
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be 1 or more, not {self.top_k}")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UsageError(f"top_p must be from 0 to 1, not {self.top_p}")
        if self.greedy and (self.top_k is not None or self.top_p is not None):
            raise UsageError(
                "top_k and top_p have no effect at temperature 0, which always chooses the most likely token",
                "Give a temperature above 0.",
            )
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed must be an integer from 0 to 2**64 - 1, not {self.seed}")

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is always chosen."""
        return self.temperature == 0

    def filtered(self, logits: Tensor) -> Tensor:
        """Return the logits (B, vocabulary) in fp32 after temperature, top-k and top-p: -inf for excluded tokens.

        The temperature must be above 0.
        """
        scores = logits.float() / self.temperature
        if self.top_k is not None:
            smallest = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < smallest, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            # Ascending as in transformers, since the sort decides the order of equal tokens.
            ordered, places = scores.sort(descending=False)
            excluded = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
            excluded[..., -1] = False
            scores = scores.masked_fill(excluded.scatter(-1, places, excluded), -math.inf)
        return scores


@dataclass(frozen=True)
class Beams:
    """The settings of a beam search, which extends the `count` most likely continuations by one token in every step.

    A continuation ends with a stop id, or after the largest number of tokens. Its score is its log-probability divided
    by its length to the power of `length_penalty`. The search stores the `count` ended continuations with the best
    scores. It ends when no running continuation has a better score than the worst of these.

    Raises:
        UsageError: there are fewer than two beams, or the penalty is not a finite number.
    """

    count: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    """End the search as soon as `count` continuations have ended."""

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UsageError(
                f"beam search needs 2 beams or more, not {self.count}", "For greedy decoding, leave beams out."
            )
        if not math.isfinite(self.length_penalty):
            raise UsageError(f"the length penalty must be a finite number, not {self.length_penalty}")


_GREEDY = Sampling()


def warn(line: str, stacklevel: int = 3) -> None:
    """Issue `line` as a UserWarning that points to the code which asks for the next token."""
    warnings.warn(line, UserWarning, stacklevel=stacklevel)


def generate(
    model: Decoder,
    input_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = _GREEDY,
    beams: Beams | None = None,
    stop: Collection[int] = (),
    start: int | None = None,
    cache: Caching = "dynamic",
    tell: Callable[[str], None] = warn,
) -> Iterator[int]:
    """Yield the token ids that continue a prompt. Every token is computed when it is asked for.

    The continuation ends after `max_new_tokens`, or after an id of `stop`, which is yielded too, as in transformers. It
    also ends when a model with a position table of L rows has used all of them. Prompt and continuation then have
    L + 1 ids, because the last one is predicted but never read. `tell` is called in this case. It is also called once
    when the text becomes longer than the context that a model with RoPE was trained for. ALiBi models have no limit.

    A model with an encoder reads the prompt as its source, once, and writes another text, which begins after `start`.

    With `cache="auto"` on a CUDA device, the model's step is recorded as a CUDA graph with a static cache, if the step
    allows it, and then replayed. The step after a token begins before the token is yielded. The text can differ from
    that of the dynamic cache where two tokens are equally likely up to rounding, because sums then have another order.

    No global state changes: sampling has its own random generator, and inference mode is off between tokens.

    Args:
        model: a model with its weights loaded. It computes on their device.
        input_ids: the prompt, T ids, or a tensor (T,) or (1, T).
        max_new_tokens: the largest number of tokens to generate, 0 or more.
        sampling: the rule by which a token is chosen. The default is greedy decoding.
        beams: use beam search with these settings. The continuation is yielded when the search has ended.
        stop: the ids after which generation ends, such as the end-of-sequence token.
        start: the first id of the decoder of a model with an encoder (its decoder_start_token_id).
        cache: the kind of cache. "auto" is static on a CUDA device for 8 tokens or more, if the model has no hooks and
            its step neither waits for the device nor copies from the host. On a CPU, "static" works without a graph.
            Graphs have not been tested on a GPU yet, so the default is "dynamic".
        tell: a function that gets a message when a limit of the model is reached. By default it is a UserWarning.

    Raises:
        UsageError: before anything is computed: the prompt is empty, is a batch, has ids outside the vocabulary, or is
            longer than the table of positions; max_new_tokens is negative; beams are combined with sampling or with a
            static cache; the model has an encoder, but there is no `start`.
        GptkitError: during generation, the logits are NaN.
    """
    model.spec.predicts("generate")
    prompt = _prompt(model, input_ids)
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens must be 0 or more, not {max_new_tokens}")
    if beams is not None and not sampling.greedy:
        raise UsageError(
            "beam search cannot be combined with temperature, top_k and top_p, because it does not sample",
            "Leave out temperature, top_k and top_p.",
        )
    if cache not in get_args(Caching):
        raise UsageError(f"cache must be 'auto', 'static' or 'dynamic', not {cache!r}")
    if beams is not None and cache == "static":
        raise UsageError("beam search cannot be combined with a static cache", "Leave out cache.")
    positions = (model.spec.encoder or model.spec).positions
    if positions is not None and prompt.shape[1] > positions.length:
        raise UsageError(
            f"the prompt has {prompt.shape[1]} tokens, but the model's position table has only {positions.length} rows",
            "Shorten the prompt.",
        )
    source = None
    if model.spec.encoder is not None:
        if start is None:
            raise UsageError(
                "gptkit does not know the first token of the decoder: config.json has no decoder_start_token_id",
                "Set decoder_start_token_id in config.json, or in Python pass start=ID.",
            )
        source, prompt = prompt, _prompt(model, [start])
    elif start is not None:
        raise UsageError(
            "the argument start is only for models with an encoder, and this model has none", "Leave out start."
        )
    # A generator function runs only when its first token is asked for, so the checks above are not inside one.
    if beams is not None:
        return _searched(model, prompt, source, max_new_tokens, beams, frozenset(stop), tell)
    return _stream(model, prompt, source, max_new_tokens, sampling, frozenset(stop), cache, tell)


@torch.inference_mode()
def _begun(model: Decoder, source: Tensor | None, rows: int = 1) -> Cache:
    """Return an empty cache for `rows` continuations, with the encoder's output if there is a source."""
    cache = Cache(model.spec)
    if source is not None:
        cache.encoded = model.encode(source).repeated(rows)
    return cache


def _prompt(model: Decoder, input_ids: Sequence[int] | Tensor) -> Tensor:
    """Check the prompt, and return it as a tensor (1, T) of int64 on the model's device."""
    ids = input_ids if isinstance(input_ids, Tensor) else torch.tensor(_integers(input_ids), dtype=torch.long)
    if ids.dim() == 1:
        ids = ids[None]
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise UsageError(
            f"token ids must have the shape (T,) or (1, T), not {tuple(ids.shape)}", "Give one prompt per call."
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UsageError(f"token ids must be integers, not {ids.dtype}")
    if ids.shape[1] == 0:
        raise UsageError("the prompt is empty", "Give at least one token, such as the beginning-of-sequence token.")
    ids, vocab_size = ids.to(device=model.embedding.weight.device, dtype=torch.long), model.spec.vocab_size
    outside = ids[(ids < 0) | (ids >= vocab_size)].tolist()
    if outside:
        raise outside_vocabulary(outside, vocab_size, f"Give token ids from 0 to {vocab_size - 1}.")
    return ids


def _integers(ids: Sequence[int]) -> list[int]:
    """Return the ids as Python integers. Raises UsageError if one is not an integer, or does not fit int64."""
    for token in ids:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise UsageError(f"{token!r:.60} is not a token id", "Give integers.")
        if not -(2**63) <= token.__index__() < 2**63:
            raise UsageError(f"{token} is not a token id", "Give integers from 0 up to the size of the vocabulary.")
    return [token.__index__() for token in ids]


def outside_vocabulary(ids: Sequence[int], vocab_size: int, hint: str) -> UsageError:
    """Return the error for ids outside the vocabulary. The caller raises it."""
    return UsageError(
        f"the prompt has token ids outside the vocabulary of {vocab_size:,} tokens: {some_of(ids, 5)}", hint
    )


class _Limits:
    """The limits of a model on the length of a text, and the messages for texts that reach them."""

    def __init__(self, spec: ModelSpec) -> None:
        rotaries = [rotary for rotary in spec.components() if isinstance(rotary, Rotary)]
        grows = any(isinstance(rotary.scaling, DynamicScaling) for rotary in rotaries)  # with the text
        self.table, self.context = spec.positions, spec.context_length if rotaries and not grows else None
        scalings = [rotary.scaling for rotary in rotaries if isinstance(rotary.scaling, LongRopeScaling)]
        self.renewing = {scaling.original_context for scaling in scalings if scaling.renewed}

    def full(self, read: int) -> str:
        """Return a message if a text of `read` tokens is longer than the position table, else an empty string."""
        if self.table is None or read <= self.table.length:
            return ""
        return f"generation stopped: the model has {self.table.length:,} positions, and all are used"

    def passed(self, read: int, first: bool) -> str:
        """Return a message if a text of `read` tokens is longer than the model's context, else an empty string.

        So that users see the message once, it is returned only if the text is longer by exactly one token, or in the
        first step (`first`), when the prompt alone may be longer.
        """
        if self.context is None or read <= self.context or not (first or read == self.context + 1):
            return ""
        return f"the text is longer than the model's context of {self.context:,} tokens, so the rest may be nonsense"

    def renewed(self, read: int) -> bool:
        """Return whether the cache must be built again when the text has `read` tokens.

        Some RoPE scalings (LongRoPE) rotate all keys by other angles once a text exceeds the original context.
        """
        return read - 1 in self.renewing


def _stream(
    model: Decoder,
    prompt: Tensor,
    source: Tensor | None,
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    caching: Caching,
    tell: Callable[[str], None],
) -> Iterator[int]:
    """Yield the continuation's token ids, chosen greedily or by sampling. The arguments are those of `generate`."""
    limits = _Limits(model.spec)
    choose: Callable[[Tensor], Tensor] = _greedy
    if not sampling.greedy:
        generator = torch.Generator(device=prompt.device)
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        choose = partial(_sampled, sampling, generator)
    most = prompt.shape[1] + max_new_tokens - 1
    options = Options(choose, sampling.greedy, caching, most, tell)
    steps, text = Steps(model, _begun(model, source), prompt, options), prompt[0].tolist()
    try:
        for step in range(max_new_tokens):
            read = prompt.shape[1] + step
            if line := limits.full(read):
                tell(line)
                return
            if line := limits.passed(read, step == 0):
                tell(line)
            if step and limits.renewed(read):
                steps = Steps(model, _begun(model, source), prompt.new_tensor([text]), options)
            more = step + 1 < max_new_tokens and not limits.full(read + 1) and not limits.renewed(read + 1)
            token = steps.next(more)
            if token < 0:
                raise _no_numbers(step)
            text.append(token)
            yield token
            if token in stop:
                return
    finally:
        steps.close()


def _no_numbers(step: int) -> GptkitError:
    """Return the error for logits that are NaN. The caller raises it."""
    return GptkitError(
        f"the model's logits for new token {step + 1} are NaN",
        "The weights may be damaged, or activations may be too large for float16. Try the dtype float32.",
    )


def _searched(
    model: Decoder,
    prompt: Tensor,
    source: Tensor | None,
    max_new_tokens: int,
    beams: Beams,
    stop: frozenset[int],
    tell: Callable[[str], None],
) -> Iterator[int]:
    """Yield the best continuation of a beam search. The whole search runs before the first token is yielded."""
    if max_new_tokens:
        continuation, lines = _search(model, prompt, source, max_new_tokens, beams, stop)
        for line in lines:
            tell(line)
        yield from continuation


@torch.inference_mode()
def _search(
    model: Decoder, prompt: Tensor, source: Tensor | None, max_new_tokens: int, beams: Beams, stop: frozenset[int]
) -> tuple[list[int], list[str]]:
    """Run a beam search. Return the best continuation, and the messages about texts that reach the model's limits.

    The tensors have the same shapes as in transformers' _beam_search, so that ties are resolved in the same order.
    """
    limits, lines = _Limits(model.spec), list[str]()
    count, length, cache = beams.count, prompt.shape[1], _begun(model, source, beams.count)
    candidates = max(2, 1 + len(stop)) * count
    running = ids = prompt.repeat(count, 1)  # (count, tokens)
    scores = torch.full((1, count), _NEVER, device=prompt.device)
    ended = scores.clone()  # the scores of the best ended continuations, in descending order
    scores[:, 0] = 0.0  # all beams are equal at first, so only the first one goes on
    texts: list[list[int]] = [[]] * count
    done = torch.zeros(1, count, dtype=torch.bool, device=prompt.device)
    improving = True
    for step in range(max_new_tokens):
        lines.append(limits.passed(length + step, step == 0))
        if step and limits.renewed(length + step):
            cache, ids = _begun(model, source, count), running
        logits = model(ids, cache=cache, last_only=True)[:, -1].float()
        if bool(logits.isnan().any()):
            raise _no_numbers(step)
        totals = (logits.log_softmax(dim=-1) + scores[0, :, None]).reshape(1, -1)
        best, places = totals.topk(candidates)
        rows, tokens = places[0] // logits.shape[-1], places[0] % logits.shape[-1]
        full = "" if step + 1 == max_new_tokens else limits.full(length + step + 1)
        lines.append(full)
        last = step + 1 == max_new_tokens or bool(full)
        ends = torch.tensor([[last or token in stop for token in tokens.tolist()]], device=prompt.device)
        # Sort the continuations that end here, if they are among the first `count`, with those that ended before.
        new = best / (step + 1) ** beams.length_penalty
        new = new + float(bool(done.all()) and beams.early_stopping) * _NEVER + float(not improving) * _NEVER
        ending = ends & (torch.arange(candidates, device=prompt.device) < count)
        new = new + ~ending * _NEVER
        ended, best_ended = torch.cat((ended, new), dim=1).topk(count)
        longer = torch.cat((running[rows, length:], tokens[:, None]), dim=1).tolist()
        texts = [(texts + longer)[index] for index in best_ended[0].tolist()]
        done = torch.cat((done, ending), dim=1).gather(1, best_ended)
        # Choose the continuations that go on.
        going = best + ends.float() * _NEVER
        chosen = going.topk(count)[1]
        scores, rows, tokens = going.gather(1, chosen), rows[chosen[0]], tokens[chosen[0]]
        running = torch.cat((running[rows], tokens[:, None]), dim=1)
        ids = tokens[:, None]
        cache.reorder(rows)
        if bool(done.all()):
            improving = improving and bool(scores[0, 0] / (step + 1) ** beams.length_penalty > ended.min())
        if not improving or (bool(done.all()) and beams.early_stopping) or bool(ends.all()):
            break
    return texts[0], [line for line in lines if line]


def _greedy(logits: Tensor) -> Tensor:
    """Return the most likely token id (1, 1) for logits (1, vocabulary), or -1 if the logits are NaN."""
    chosen = logits.argmax(dim=-1, keepdim=True)
    # argmax prefers NaN to any number, so it suffices to look at the chosen logit.
    return torch.where(logits.gather(-1, chosen).isnan(), -1, chosen)


def _sampled(sampling: Sampling, generator: torch.Generator, logits: Tensor) -> Tensor:
    """Return a token id (1, 1) drawn for logits (1, vocabulary), or -1 if the logits are NaN or infinite.

    It is the token that `multinomial` draws, by the same operations, but the host does not wait for the device.
    """
    probabilities = sampling.filtered(logits).softmax(dim=-1)
    noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
    unknown = logits.isnan().any() | probabilities.isnan().any()
    return torch.where(unknown, -1, (probabilities / noise).argmax(dim=-1, keepdim=True))

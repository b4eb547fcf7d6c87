"""lm-evaluation-harness asks, gptkit answers: any reference that `load` takes as one of its models.

    import lm_eval
    from gptkit.training.harness import HarnessModel

    lm_eval.simple_evaluate(HarnessModel("sample:llama"), tasks=["lambada_openai"])

What is asked is read, cut and given a first token as the harness' own class for transformers does, so that a task has
one result by either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..analysis.activations import Kernel
from ..analysis.costs import stated_context
from ..converter.checkpoint import open_checkpoint
from ..converter.tokenizer import StreamDecoder, load_tokenizer
from ..errors import UsageError
from ..modules.generate import Sampling, generate
from ..modules.load import load_checkpoint
from .data import around
from .evaluate import MOST, predicted, states_of

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UsageError(
        "HarnessModel needs the package lm-evaluation-harness, which is not installed",
        "Install it: pip install 'gptkit[lm-eval]'",
    ) from error

_NEW_TOKENS = 256
"""Of a continuation for which a task does not say how long it may be, as the harness has it."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model of the harness.

    Args:
        pretrained: a reference; see `converter.resolve`.
        dtype: what to compute in.
        attention: "sdpa" or "eager".
        device: where to compute.
        max_length: tokens that the model is given at most; by default what it is for, `MOST` where it does not say.
        opening: as `open_checkpoint`.

    Raises:
        InvalidInput, Offline: as `open_checkpoint`.
        UsageError: no tokenizer, or one without a token that begins or ends a text, which an empty prompt stands for.
    """

    def __init__(
        self,
        pretrained: str | Path,
        dtype: torch.dtype | str = "float32",
        attention: Kernel = "sdpa",
        *,
        device: str | torch.device = "cpu",
        max_length: int | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        checkpoint = open_checkpoint(pretrained, **opening)
        found = load_tokenizer(checkpoint.folder, checkpoint.texts)
        if found is None:
            raise UsageError(
                f"{checkpoint.reference} has no tokenizer, but the tasks of lm-evaluation-harness are texts"
            )
        self.coder = found
        first = [*around(found, ())[0], *found.eos_ids]
        if not first:
            raise UsageError(
                f"the tokenizer of {checkpoint.reference} has no beginning-of-sequence or end-of-sequence token"
            )
        self._first, self._device = first[0], torch.device(device)
        self.model = load_checkpoint(checkpoint, dtype, attention, device=device)
        self.max_length = max_length or stated_context(checkpoint.spec) or MOST

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return next(iter(self.coder.eos_ids), self._first)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty prompt."""
        return self._first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, without special tokens unless they are asked for."""
        return self.coder.encode(string, special=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding would say it) of each continuation."""
        found = []
        for _text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"an answer of a task has {len(continuation):,} tokens, but the model's longest sequence "
                    f"(max_length) is {self.max_length:,}"
                )
            ids = torch.tensor([*context, *continuation][-(self.max_length + 1) :], device=self._device)
            states = states_of(self.model, ids[None, :-1])[0]
            kept = len(continuation)
            lost, rank = (
                torch.cat(each) for each in zip(*predicted(self.model, states[-kept:], ids[-kept:]), strict=True)
            )
            found.append((-lost.sum().item(), not bool(rank.any())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-probability of each text, in windows that follow one another."""
        found = []
        for request in requests:
            options = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
            windows = get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), **options)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(each for each, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Each prompt's continuation up to the first of the texts that end it, which it is given without."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, prompt: str, options: dict[str, Any]) -> str:
        ends = options.get("until") or []
        ends = [ends] if isinstance(ends, str) else list(ends)
        count = int(options.get("max_gen_toks") or options.get("max_new_tokens") or _NEW_TOKENS)
        if count >= self.max_length:
            raise UsageError(
                f"a task generates {count:,} tokens, but the model's longest sequence (max_length) is "
                f"{self.max_length:,}"
            )
        heat = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        chosen = {name: options[name] for name in ("top_k", "top_p") if heat and name in options}
        ids = self.tok_encode(prompt)[-(self.max_length - count) :] or [self.prefix_token_id]
        stream, text = StreamDecoder(self.coder, skip_special_tokens=True, prompt=ids), ""
        new = generate(
            self.model, ids, count, sampling=Sampling(heat, **chosen), stop=self.coder.eos_ids, tell=lambda _: None
        )
        for token in new:
            text += stream.push(token)
            if any(end in text for end in ends):
                break
        text += stream.finish()
        return text[: min((text.index(end) for end in ends if end in text), default=len(text))]

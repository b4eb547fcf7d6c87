"""Evaluate a model on the tasks of lm-evaluation-harness. The model may be anything that `load` takes.

    import lm_eval
    from gptkit.training.harness import HarnessModel

    lm_eval.simple_evaluate(HarnessModel("sample:llama"), tasks=["lambada_openai"])

Prompts are encoded, truncated and given a first token as in the harness's own class for transformers, so that both
classes give the same results.
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
from ..modules.devices import Device, device_of
from ..modules.generate import Sampling, generate
from ..modules.load import load_checkpoint
from .data import boundary_ids
from .evaluate import MOST, losses_and_ranks, states_of

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise UsageError(
        "HarnessModel needs the package lm-evaluation-harness, which is not installed",
        "Install it: pip install 'gptkit[lm-eval]'",
    ) from error

_NEW_TOKENS = 256
"""The number of tokens to generate if a task gives none; it is the harness's own default."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model for lm-evaluation-harness.

    Args:
        pretrained: a checkpoint: a folder, a file, a sample, a preset, or a repository on the hub.
        dtype: the dtype of the computation.
        attention: "sdpa" or "eager".
        device: where to compute: "cpu", "cuda", "cuda:1" or "mps"; by default ("auto") on a GPU if there is one.
        max_length: the largest number of tokens that the model reads; by default the context that it states, or 2,048.
        opening: options for opening the checkpoint, as in `open_checkpoint`.

    Raises:
        InvalidInput, Offline: as in `open_checkpoint`.
        UsageError: there is no tokenizer, or the tokenizer has neither a beginning-of-sequence nor an end-of-sequence
            token. One of them replaces an empty prompt.
    """

    def __init__(
        self,
        pretrained: str | Path,
        dtype: torch.dtype | str = "float32",
        attention: Kernel = "sdpa",
        *,
        device: Device = "auto",
        max_length: int | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        checkpoint = open_checkpoint(pretrained, **opening)
        tokenizer = load_tokenizer(checkpoint.folder, checkpoint.texts)
        if tokenizer is None:
            raise UsageError(
                f"{checkpoint.reference} has no tokenizer, but the tasks of lm-evaluation-harness are texts"
            )
        self.coder = tokenizer
        first = [*boundary_ids(tokenizer, ())[0], *tokenizer.eos_ids]
        if not first:
            raise UsageError(
                f"the tokenizer of {checkpoint.reference} has no beginning-of-sequence or end-of-sequence token"
            )
        self._first, self._device = first[0], device_of(device)
        self.model = load_checkpoint(checkpoint, dtype, attention, device=self._device)
        self.max_length = max_length or stated_context(checkpoint.spec) or MOST

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return next(iter(self.coder.eos_ids), self._first)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty prompt."""
        return self._first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, with special tokens only if `add_special_tokens` is true."""
        return self.coder.encode(string, special=bool(add_special_tokens))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of every continuation, and whether greedy decoding would generate it.

        A request has the context and continuation as text, and the token ids of both.
        """
        results = []
        for _text, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise UsageError(
                    f"an answer of a task has {len(continuation):,} tokens, but the model's longest sequence "
                    f"(max_length) is {self.max_length:,}"
                )
            ids = torch.tensor([*context, *continuation][-(self.max_length + 1) :], device=self._device)
            states = states_of(self.model, ids[None, :-1])[0]
            length = len(continuation)
            losses, ranks = (
                torch.cat(parts)
                for parts in zip(*losses_and_ranks(self.model, states[-length:], ids[-length:]), strict=True)
            )
            results.append((-losses.sum().item(), not bool(ranks.any())))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Return the log-probability of every text. Long texts are read in consecutive windows."""
        results = []
        for request in requests:
            options = {"prefix_token": self.prefix_token_id, "max_seq_len": self.max_length, "context_len": 1}
            windows = get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), **options)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            results.append(sum(log_probability for log_probability, _ in self._loglikelihood_tokens(parts)))
        return results

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Return the continuation of every prompt, up to the first stop text and without it."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, prompt: str, options: dict[str, Any]) -> str:
        """Return the continuation of one prompt. `options` are the `generation_kwargs` of a task."""
        ends = options.get("until") or []
        ends = [ends] if isinstance(ends, str) else list(ends)
        count = int(options.get("max_gen_toks") or options.get("max_new_tokens") or _NEW_TOKENS)
        if count >= self.max_length:
            raise UsageError(
                f"a task generates {count:,} tokens, but the model's longest sequence (max_length) is "
                f"{self.max_length:,}"
            )
        temperature = float(options.get("temperature") or 0.0) if options.get("do_sample", True) else 0.0
        filters = {name: options[name] for name in ("top_k", "top_p") if temperature and name in options}
        ids = self.tok_encode(prompt)[-(self.max_length - count) :] or [self.prefix_token_id]
        stream, text = StreamDecoder(self.coder, skip_special_tokens=True, prompt=ids), ""
        tokens = generate(
            self.model,
            ids,
            count,
            sampling=Sampling(temperature, **filters),
            stop=self.coder.eos_ids,
            tell=lambda _: None,
        )
        for token in tokens:
            text += stream.push(token)
            if any(end in text for end in ends):
                break
        text += stream.finish()
        return text[: min((text.index(end) for end in ends if end in text), default=len(text))]

"""What models give that are compared: logits, or where they have no head hidden states and what is pooled of them."""

from typing import Any

import torch
from torch import Tensor

from ..modules.decoder import Decoder
from .probe import Batch


def outputs_of(model: Any, batch: Batch) -> Tensor:
    """The logits (B, T, V) of transformers' model or of gptkit's; without a head the hidden states and beside each the
    text's pooled vector, or its first token's state where there is no pooler: (B, T, 2 · hidden).
    """
    given: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if isinstance(model, Decoder):
        types = {} if batch.token_types is None else {"token_types": batch.token_types}
        states: Tensor = model(**given, **types)
        if model.head is not None:
            return states
        pooled = None if model.pooler is None else model.pooler(states)
    else:
        types = {} if batch.token_types is None else {"token_type_ids": batch.token_types}
        found = model(**given, **types)
        if isinstance(found, Tensor) or hasattr(found, "logits"):
            logits: Tensor = getattr(found, "logits", found)
            return logits
        states, pooled = found.last_hidden_state, getattr(found, "pooler_output", None)
    return with_pooled(states, pooled)


def with_pooled(states: Tensor, pooled: Tensor | None) -> Tensor:
    """Hidden states and beside each the text's pooled vector, or its first token's state."""
    beside = states[:, 0] if pooled is None else pooled
    return torch.cat((states, beside[:, None].expand_as(states)), dim=-1)

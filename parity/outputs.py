"""Compute the model outputs that gptkit compares.

These are logits. A model without a head has hidden states and a pooled vector instead.
"""

from typing import Any

import torch
from torch import Tensor

from ..architectures.base import Architecture
from ..modules.decoder import Decoder
from .probe import ProbeBatch


def computed_rightly(family: Architecture | None, batch: ProbeBatch) -> bool:
    """Return whether transformers' class of this model family computes a batch correctly.

    The kinds of input that it computes wrongly are declared in `Architecture.wrong_batches`.
    """
    wrong, mask = () if family is None else family.wrong_batches, batch.attention_mask
    texts, tokens = batch.input_ids.shape
    padded = mask is not None and not bool(mask[:, 0].all())
    return not (padded and "padding" in wrong) and not (texts > 1 and tokens == 1 and "steps" in wrong)


def outputs_of(model: Any, batch: ProbeBatch) -> Tensor:
    """Return the logits (B, T, V) of transformers' model or of gptkit's.

    For a model without a head, return the hidden states of each token concatenated with the text's pooled vector, (B,
    T, 2 · hidden). Without a pooler, the first token's hidden state takes the place of the pooled vector.

    For a model with an encoder and a decoder, the encoder reads the batch and the decoder reads the reversed batch, so
    every logit depends on both texts. Token ids are reduced modulo the size of each vocabulary.
    """
    given: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    reversed_ids = batch.input_ids.flip(-1)
    if isinstance(model, Decoder) and model.encoder is not None:
        source = batch.input_ids % model.encoder.spec.vocab_size
        encoded = model.encode(source, batch.attention_mask)
        written: Tensor = model(reversed_ids % model.spec.vocab_size, encoded=encoded)
        return written
    config = getattr(model, "config", None)
    if not isinstance(model, Decoder) and config is not None and getattr(config, "is_encoder_decoder", False):
        given["input_ids"] = batch.input_ids % config.vocab_size
        target = reversed_ids % (getattr(config, "decoder_vocab_size", None) or config.vocab_size)
        decoded: Tensor = model(**given, decoder_input_ids=target).logits
        return decoded
    if isinstance(model, Decoder):
        known = batch.token_types is not None and model.token_types is not None  # a mistake may drop the table
        types = {"token_types": batch.token_types} if known else {}
        states: Tensor = model(**given, **types)
        if model.head is not None:
            return states
        pooled = None if model.pooler is None else model.pooler(states)
    else:
        types = {} if batch.token_types is None else {"token_type_ids": batch.token_types}
        output = model(**given, **types)
        if isinstance(output, Tensor) or hasattr(output, "logits"):
            logits: Tensor = getattr(output, "logits", output)
            return logits
        states, pooled = output.last_hidden_state, getattr(output, "pooler_output", None)
    return with_pooled(states, pooled)


def with_pooled(states: Tensor, pooled: Tensor | None) -> Tensor:
    """Return hidden states (B, T, hidden), each concatenated with the text's pooled vector, (B, hidden).

    Without a pooled vector, the first token's hidden state takes its place.
    """
    vector = states[:, 0] if pooled is None else pooled
    return torch.cat((states, vector[:, None].expand_as(states)), dim=-1)

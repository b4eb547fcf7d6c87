"""Train the four small sample checkpoints (GPT-2, Llama, BLOOM, Falcon) from scratch on a plain text file.

    python examples/train_samples.py --text tinyshakespeare.txt --out samples

The last tenth of the text is held out.  One byte-level BPE tokenizer of 512 tokens, trained on the rest, is shared by
all samples.  Each model is trained in float32, cast to its 16-bit storage type, saved by `save_pretrained`, loaded
again, and only then evaluated and sampled from: the printed numbers are those of the files on disk.

A run is reproducible for a given seed, thread count and PyTorch build.  With `--seconds` the learning-rate schedule
follows the clock, so two such runs differ.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 512
CONTEXT = 256
EOT = "<|endoftext|>"
EOT_ID = 0
PROMPT = "ROMEO:\n"
MAX_BYTES = 1_500_000


@dataclass(frozen=True)
class Sample:
    """One checkpoint to train: how to configure it, how to store it and for how long to train it."""

    title: str
    config: Callable[[], PreTrainedConfig]
    dtype: torch.dtype
    steps: int


@dataclass(frozen=True)
class Result:
    """What is reported about a trained sample; the loss is that of the 16-bit files on disk."""

    name: str
    params: int
    seconds: float
    steps: int
    nats_per_token: float
    bits_per_byte: float
    bytes_on_disk: int


def gpt2_config() -> transformers.GPT2Config:
    """GPT-2: learned positions, fused Conv1D projections with biases, tied head."""
    return transformers.GPT2Config(
        n_positions=CONTEXT, n_embd=112, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0,
    )  # fmt: skip


def llama_config() -> transformers.LlamaConfig:
    """Llama: grouped queries (6 heads on 2), a head width that is not hidden/heads, untied head."""
    return transformers.LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2,
        head_dim=24, max_position_embeddings=CONTEXT, tie_word_embeddings=False, attention_dropout=0.0,
    )  # fmt: skip


def bloom_config() -> transformers.BloomConfig:
    """BLOOM: ALiBi over 6 heads (not a power of two), normalised embeddings, tied head."""
    return transformers.BloomConfig(hidden_size=108, n_layer=4, n_head=6, hidden_dropout=0.0, attention_dropout=0.0)


def falcon_config() -> transformers.FalconConfig:
    """Falcon, 7b style: multi-query, parallel attention with one norm per block, rotary, no linear biases, tied."""
    return transformers.FalconConfig(
        hidden_size=112, num_hidden_layers=5, num_attention_heads=7, multi_query=True, parallel_attn=True,
        new_decoder_architecture=False, alibi=False, bias=False, max_position_embeddings=CONTEXT,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


SAMPLES = {
    "gpt2": Sample("GPT-2", gpt2_config, torch.float16, 4000),
    "llama": Sample("Llama", llama_config, torch.bfloat16, 4000),
    "bloom": Sample("BLOOM", bloom_config, torch.float16, 3600),
    "falcon": Sample("Falcon", falcon_config, torch.bfloat16, 2400),
}


def train_tokenizer(text: str) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `VOCAB_SIZE` tokens; plain text encodes without any special token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    assert bpe.get_vocab_size() == VOCAB_SIZE and bpe.token_to_id(EOT) == EOT_ID
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=EOT, eos_token=EOT, pad_token=EOT,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Initialise a model: a width-dependent spread for matrices, small positions, and off-centre LayerNorm models.

    LayerNorm takes the mean out of the residual stream, so training alone leaves it near zero.  Starting token
    embeddings and norm biases with a mean of their own makes the centring matter, as it does in larger checkpoints.
    """
    torch.manual_seed(seed)
    config.vocab_size = VOCAB_SIZE
    config.bos_token_id = config.eos_token_id = EOT_ID
    config.pad_token_id = None  # set after training: Llama would freeze the padding row, which is the bos row here
    config.initializer_range = spread = 0.5 / math.sqrt(config.hidden_size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
    for norm in norms:
        torch.nn.init.normal_(norm.bias, mean=0.1, std=0.1)
    if norms:
        torch.nn.init.normal_(model.get_input_embeddings().weight, mean=spread / 2, std=spread)
    if config.model_type == "gpt2":
        torch.nn.init.normal_(model.transformer.wpe.weight, std=spread / 4)
    return model


def make_optimizer(model: PreTrainedModel, lr: float) -> torch.optim.AdamW:
    """AdamW; norms and biases learn three times as fast as matrices and, like embeddings, do not decay."""
    kinds = [(lr, 0.1), (lr, 0.0), (3 * lr, 0.0)]
    groups: list[dict] = [{"params": [], "lr": rate, "peak": rate, "weight_decay": decay} for rate, decay in kinds]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for param in model.parameters():
        groups[2 if param.ndim < 2 else 1 if id(param) in embeddings else 0]["params"].append(param)
    return torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.98), fused=True)


def learning_rate_factor(progress: float) -> float:
    """Linear warmup over the first 4 %, then a cosine down to 3 % of the peak."""
    warmup, floor = 0.04, 0.03
    if progress < warmup:
        return (progress + 1e-3) / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def train(model: PreTrainedModel, ids: torch.Tensor, args: argparse.Namespace, steps: int) -> tuple[int, float]:
    """Train on random windows of `ids`, one in eight opened by the bos token; return the steps and seconds taken."""
    rng = np.random.default_rng(args.seed)
    optimizer = make_optimizer(model, args.lr)
    model.train()
    start, step, running = time.monotonic(), 0, math.log(VOCAB_SIZE)
    while True:
        elapsed = time.monotonic() - start
        progress = elapsed / args.seconds if args.seconds else step / steps
        if progress >= 1:
            return step, elapsed
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_factor(progress)
        starts = torch.from_numpy(rng.integers(0, len(ids) - CONTEXT, size=args.batch))
        window = ids[starts[:, None] + torch.arange(CONTEXT + 1)]
        window[torch.from_numpy(rng.random(args.batch) < 0.125), 0] = EOT_ID
        logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        running += 0.05 * (loss.item() - running)
        if step % 200 == 0:
            print(f"  step {step:5d}  {elapsed:6.1f} s  training loss {running:.4f}", flush=True)


@torch.inference_mode()
def evaluate(model: PreTrainedModel, ids: torch.Tensor, n_bytes: int) -> tuple[float, float]:
    """Loss over consecutive windows of `ids` (worth `n_bytes`), as nats per token and as bits per byte."""
    total = 0.0
    for at in range(0, len(ids) - 1, CONTEXT):
        window = ids[at : at + CONTEXT + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(ids) - 1), total / math.log(2) / n_bytes


def check_moved(model: PreTrainedModel, initial: PreTrainedModel) -> None:
    """Print how far training moved the norms' weights and all biases, and fail if it left one where it started."""
    least: dict[str, tuple[float, str]] = {}
    for (key, value), start in zip(model.named_parameters(), initial.parameters(), strict=True):
        if value.ndim == 1:
            kind = ("norm " if "norm" in key or ".ln_" in key else "linear ") + key.rsplit(".", 1)[1]
            move = (value - start).square().mean().sqrt().item()
            least[kind] = min(least.get(kind, (math.inf, "")), (move, key))
    for kind, (move, key) in sorted(least.items()):
        print(f"  least move (rms) of a {kind}: {move:.4f} ({key})")
        assert move > 1e-3, f"{key} did not move"


def sample_ids(model: PreTrainedModel, prompt: list[int], seed: int, do_sample: bool) -> torch.Tensor:
    """Return the prompt and 160 tokens more."""
    torch.manual_seed(seed)
    options = {"temperature": 0.7, "top_k": 0} if do_sample else {}
    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    return generate(torch.tensor([prompt]), max_new_tokens=160, do_sample=do_sample, eos_token_id=None, **options)[0]


def write_readme(folder: Path, result: Result, args: argparse.Namespace) -> None:
    """Write the sample's model card."""
    sample = SAMPLES[result.name]
    length = f"--seconds {args.seconds:g}" if args.seconds else f"--steps {result.steps}"
    folder.joinpath("README.md").write_text(
        f"""# {sample.title} sample, {result.params:,} parameters

A small genuine checkpoint for trying things out, in the Hugging Face format: not a useful language model.

- Text: tiny Shakespeare (public domain), the first 90 % for training, the last 10 % held out.
- Tokenizer: byte-level BPE, {VOCAB_SIZE} tokens, trained on the training part.
- Training: from random weights, {result.steps} steps of {args.batch} x {CONTEXT} tokens, AdamW, peak rate {args.lr:g},
  cosine, {result.seconds / 60:.1f} minutes on a CPU; float32, stored as {str(sample.dtype).removeprefix("torch.")}.
- Held-out loss as stored: {result.nats_per_token:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte.
- Licence of the weights: MIT.

Made by `python examples/train_samples.py --text tinyshakespeare.txt --out samples --only {result.name}
{length} --batch {args.batch} --lr {args.lr:g} --seed {args.seed} --threads {args.threads}`
"""
    )


def make_sample(name: str, text: str, held: str, args: argparse.Namespace) -> Result:
    """Train, store, load again, evaluate and describe one sample."""
    sample, folder = SAMPLES[name], args.out / name
    tokenizer = train_tokenizer(text)
    ids, held_ids = (torch.tensor(tokenizer.encode(part, verbose=False)) for part in (text, held))
    model = build_model(sample.config(), args.seed)
    params = model.num_parameters()
    print(f"{name}: {params:,} parameters, {len(ids):,} training tokens", flush=True)
    steps, seconds = train(model, ids, args, args.steps or sample.steps)
    model.config.pad_token_id = model.generation_config.pad_token_id = EOT_ID
    folder.mkdir(parents=True, exist_ok=True)
    torch.nn.Module.to(model, sample.dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == AutoConfig.from_pretrained(folder).dtype == sample.dtype
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    loaded = loaded.float().eval()
    again = AutoTokenizer.from_pretrained(folder)
    assert again.encode(held, verbose=False) == held_ids.tolist() and again.decode(held_ids) == held

    n_bytes = len(held.encode()) - len(str(tokenizer.decode(held_ids[:1])).encode())  # the first token is not predicted
    nats, bits = evaluate(loaded, held_ids, n_bytes)
    write_readme(folder, Result(name, params, seconds, steps, nats, bits, 0), args)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= MAX_BYTES, f"{folder} holds {size:,} bytes"
    print(f"  {seconds:.0f} s, {steps} steps, {size:,} bytes")
    print(f"  held-out loss {nats:.4f} nats per token, {bits:.4f} bits per byte")
    check_moved(loaded, build_model(sample.config(), args.seed))
    for do_sample in (False, True):
        print("--- sampled" if do_sample else "--- greedy")
        output = sample_ids(loaded, again.encode(PROMPT), args.seed, do_sample)
        print(str(again.decode(output))[:200], flush=True)
    return Result(name, params, seconds, steps, nats, bits, size)


def main() -> None:
    """Parse the command line, train what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the plain text to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder to write one folder per sample into")
    parser.add_argument("--only", choices=sorted(SAMPLES), help="train just this sample")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help="training steps, instead of the sample's own number")
    length.add_argument("--seconds", type=float, help="train by the clock instead (not reproducible)")
    parser.add_argument("--batch", type=int, default=4, help="windows per step")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the matrices")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    text = args.text.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    results = [make_sample(name, text[:cut], text[cut:], args) for name in ([args.only] if args.only else SAMPLES)]
    print("\n| sample | parameters | bytes | seconds | steps | nats per token | bits per byte |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for r in results:
        row = f"| {r.name} | {r.params:,} | {r.bytes_on_disk:,} | {r.seconds:.0f} | {r.steps} "
        print(row + f"| {r.nats_per_token:.4f} | {r.bits_per_byte:.4f} |")


if __name__ == "__main__":
    main()

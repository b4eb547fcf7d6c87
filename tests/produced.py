"""Training programs write checkpoints of a model, and what it computes.

    PYTHON tests/produced.py WHAT SOURCE OUT

PYTHON has litgpt, lightning, deepspeed (DS_BUILD_OPS=0), mlx or gptqmodel (BUILD_CUDA_EXT=0) besides torch and
transformers; it ends with ABSENT where it lacks what WHAT needs. SOURCE is a Hugging Face folder of a small llama. OUT
gets a folder for each checkpoint, and beside it NAME.logits.
"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ABSENT = 77
IDS = torch.arange(40).reshape(2, 20) * 2 % 97


def source_model(source: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def folder(source: Path, out: Path, name: str, logits: torch.Tensor) -> Path:
    """One with the model's config.json, beside what the model computes."""
    (out / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", out / name)
    torch.save(logits.detach().float(), out / f"{name}.logits")
    return out / name


def add_tokenizer(folder: Path) -> None:
    """One of the words w2, w3, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, 97)}}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


@torch.no_grad()
def computed(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model.float().eval()(IDS).logits
    return logits


def litgpt(source: Path, out: Path) -> None:
    """litgpt's own model of every family that is read, with all parameters random."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    base = {"block_size": 64, "n_layer": 3, "n_embd": 32, "n_head": 4, "padded_vocab_size": 97, "hf_config": {}}
    serial = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm"}
    llama = {**serial, "mlp_class_name": "LLaMAMLP", "intermediate_size": 48, "n_query_groups": 2}
    gemma = {**llama, "mlp_class_name": "GemmaMLP", "head_size": 16, "scale_embeddings": True}
    gemma |= {"gelu_approximate": "tanh"}
    sandwich = {**gemma, "post_attention_norm": True, "post_mlp_norm": True, "attention_scores_scalar": 24}
    sandwich |= {"sliding_window_size": 8, "sliding_window_indices": [1, 0, 1]}
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}
    falcon = {"rotary_percentage": 1.0, "bias": False}
    phi = {"rotary_percentage": 0.5, "shared_attention_norm": True, "lm_head_bias": True, "gelu_approximate": "tanh"}
    for name, more in {
        "pythia": {},
        "neox": {"parallel_residual": False, "rotary_percentage": 0.5},
        "phi": phi,
        "falcon-7b": {**falcon, "n_query_groups": 1, "shared_attention_norm": True},
        "falcon-40b": {**falcon, "n_query_groups": 2},
        "Llama": llama,
        "Llama-3.1": {**llama, "rope_base": 500000, "rope_adjustments": scaled},
        "Mistral": {**llama, "sliding_window_size": 8},
        "Qwen2": {**llama, "attn_bias": True},
        "Qwen3": {**llama, "norm_qk": True, "head_size": 16},
        "Mixtral": {**llama, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2},
        "Gemma": gemma,
        "Gemma-2": {**sandwich, "attention_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "Gemma-3": {**sandwich, "norm_qk": True, "rope_local_base_freq": 10000, "rope_indices": [1, 0, 1]},
    }.items():
        config = Config(**{**base, "name": name, **more})
        model = GPT(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            logits = model(IDS)
        target = folder(source, out, name.replace(".", "_"), logits)
        (target / "config.json").unlink()
        torch.save(model.state_dict(), target / "lit_model.pth")
        save_config(config, target)


def finetuned(source: Path, out: Path) -> None:
    """What litgpt's own command leaves of two steps: a folder with the tokenizer and its hyperparameters beside."""
    import subprocess

    import docstring_parser  # noqa: F401 - without it the command fails, and the package does not ask for it
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    start = out / "start"
    start.mkdir()
    config = Config(
        name="Llama-x", hf_config={"name": "x", "org": "x"}, block_size=64, n_layer=2, n_embd=32, n_head=4,
        n_query_groups=2, vocab_size=97, padded_vocab_size=97, rotary_percentage=1.0, parallel_residual=False,
        bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=48,
    )  # fmt: skip
    torch.save(GPT(config).state_dict(), start / "lit_model.pth")
    save_config(config, start)
    add_tokenizer(start)
    said = [{"instruction": f"w{i} w{i + 1}", "output": f"w{i + 2} w{i}"} for i in range(2, 26)]
    (out / "data.json").write_text(json.dumps(said))
    options = f"--data JSON --data.json_path {out}/data.json --data.val_split_fraction 0.2 --data.num_workers 0"
    options += f" --out_dir {out}/run --logger_name csv --precision 32-true --eval.initial_validation false"
    options += " --train.max_steps 2 --train.epochs 1 --train.global_batch_size 2 --train.micro_batch_size 2"
    options += " --train.max_seq_length 32 --optimizer AdamW"
    command = "from litgpt.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", command, "finetune_full", str(start), *options.split()], check=True, cwd=out)
    model = GPT(config)
    model.load_state_dict(torch.load(out / "run" / "final" / "lit_model.pth", weights_only=True)["model"])
    with torch.no_grad():
        torch.save(model(IDS), out / "finetuned.logits")
    (out / "run" / "final").rename(out / "finetuned")


def lightning(source: Path, out: Path) -> None:
    """A step of a LightningModule, whose hyperparameters have a path among them."""
    import lightning as framework

    class Module(framework.LightningModule):
        def __init__(self, model: Any, where: Path = Path("x")) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["model"])
            self.model = model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).logits.float().pow(2).mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module(source_model(source))
    trainer = framework.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=out / "root"
    )
    trainer.fit(module, torch.utils.data.DataLoader(IDS))
    trainer.save_checkpoint(out / "last.ckpt")
    target = folder(source, out, "lightning", computed(module.model))
    shutil.move(out / "last.ckpt", target)


def fsdp(source: Path, out: Path, rank: int) -> None:
    """FSDP 2 after a step, as verl saves it (a file a rank, of DTensors, and the config in a folder of its own), and by
    torch.distributed.checkpoint with the optimizer.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = source_model(source)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    logits = computed(model)  # by both ranks
    target = folder(source, out, "fsdp", logits)
    torch.save(model.state_dict(), target / f"model_world_size_2_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), target / f"optim_world_size_2_rank_{rank}.pt")
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save({"app": states, "step": 1}, checkpoint_id=out / "dcp")
    folder(source, out, "dcp", logits)
    if rank == 0:
        model.config.save_pretrained(target / "huggingface")
        (target / "config.json").unlink()
    dist.barrier()
    dist.destroy_process_group()


def zero(stage: int) -> Callable[[Path, Path, int], None]:
    def run(source: Path, out: Path, rank: int) -> None:
        """A step of DeepSpeed, one matrix frozen; the logits are those of what its zero_to_fp32.py makes of it."""
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.comm.torch
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # would compile
        deepspeed.init_distributed("gloo")
        model = source_model(source)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(IDS[:1]).logits.float().pow(2).mean())
        engine.step()
        target = out / f"zero{stage}"
        target.mkdir(exist_ok=True)
        engine.save_checkpoint(str(target))
        if rank == 0:
            plain = source_model(source, torch.bfloat16)
            found = whole(str(target))
            # Of stages 1 and 2 the module's own weights are read, which are bf16.
            rounded = {name: tensor.contiguous().bfloat16() for name, tensor in found.items()}
            plain.load_state_dict({**plain.state_dict(), **rounded})
            if stage == 3:
                plain = plain.float()
                plain.load_state_dict({**plain.state_dict(), **{n: t.contiguous() for n, t in found.items()}})
            folder(source, out, f"zero{stage}", computed(plain))

    return run


def mlx(source: Path, out: Path) -> None:
    """Both kinds of file that MLX writes."""
    import mlx.core as mx

    weights = mx.load(str(source / "model.safetensors"))
    logits = computed(source_model(source))
    mx.savez(
        str(folder(source, out, "npz", logits) / "weights.npz"), **{n: w.astype(mx.float32) for n, w in weights.items()}
    )
    mx.save_safetensors(str(folder(source, out, "safetensors", logits) / "model.safetensors"), weights)


def gptq(source: Path, out: Path) -> None:
    """GPTQModel quantises a model on the processor, and reads what it has written."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "GPTQMODEL_CPU_WORKERS": "2"}
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    start = out / "start"
    shutil.copytree(source, start)
    add_tokenizer(start)
    config = QuantizeConfig(bits=4, group_size=32, desc_act=True, device="cpu", offload_to_disk=False)
    model = GPTQModel.load(str(start), config, dtype=torch.float16)
    rows = torch.randint(97, (8, 1, 64), generator=torch.Generator().manual_seed(0))
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    model.save(str(out / "gptq"))
    written = GPTQModel.load(str(out / "gptq"), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    plain, quantised = source_model(source), 0
    for name, module in written.model.named_modules():
        if hasattr(module, "dequantize_weight"):
            plain.get_submodule(name).weight.data = module.dequantize_weight().T.float()
            quantised += 1
    assert quantised == 7 * len(plain.model.layers)
    torch.save(computed(plain), out / "gptq.logits")


ALONE: dict[str, Callable[[Path, Path], None]] = {
    "litgpt": litgpt,
    "finetuned": finetuned,
    "lightning": lightning,
    "mlx": mlx,
    "gptq": gptq,
}
RANKS: dict[str, Callable[[Path, Path, int], None]] = {"fsdp": fsdp, "zero1": zero(1), "zero3": zero(3)}


def by_ranks(what: str, source: Path, out: Path) -> int:
    """Two processes, and the worse of their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                RANKS[what](source, out, rank)
                code = 0
            except ModuleNotFoundError as error:
                print(error, file=sys.stderr)
                code = ABSENT
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    what, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if what in RANKS:
        sys.exit(by_ranks(what, source, out))
    try:
        ALONE[what](source, out)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        sys.exit(ABSENT)

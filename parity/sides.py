"""Compute the logits of both models of a verification, transformers' and gptkit's.

The reference is transformers' own class, loaded without remote code. Both models run in memory, or one layer at a time
if they are larger than memory. In the latter case both run their own unchanged forward method with parameters on the
meta device. The weights of a layer (or of the embedding, last norm or head) are read from the files just before it is
called, and dropped afterwards. All batches go through a layer before the next layer is read (see `passes`). This needs
memory for the largest layer, twice while it is converted, and for the activations.

Both models compute on the device of the batches. The logits and everything else that is compared are copied to the CPU.
"""

from __future__ import annotations

import json
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from ..analysis.activations import Kernel
from ..architectures import BY_MODEL_TYPE, Architecture
from ..converter.checkpoint import Checkpoint
from ..converter.convert import plan_conversion
from ..converter.publish import Staging
from ..converter.targets import Target
from ..converter.weights import Tree
from ..converter.write import execute
from ..errors import CannotExpress, CheckpointError, GptkitError
from ..modules.decoder import Decoder
from ..modules.load import filled, load_checkpoint, tensor_of, view_as_torch
from .outputs import outputs_of
from .passes import ask, hooked, run_together, trim_heaps
from .probe import ProbeBatch, device_of_batches

_NO_CLASS = "this model has no transformers class to compare with"
_CPU = torch.device("cpu")
_KEPT_BYTES = 256 * 2**20
"""Parameters up to this size pass on their memory to the next parameter of the same shape."""


@contextmanager
def reference_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a folder that `AutoModelForCausalLM.from_pretrained` can load.

    This is the checkpoint's own folder if possible, else a temporary folder with converted HF files. Raises
    CannotExpress if no transformers class computes the model.
    """
    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress(_NO_CLASS)
    readable = checkpoint.format == "hf" and checkpoint.path.is_dir() and not checkpoint.notes
    if readable and architecture.export_config(checkpoint.spec, checkpoint.origin.config, standard=True) is None:
        yield checkpoint.path
        return
    try:
        plan = plan_conversion(checkpoint, Target("hf", architecture.name))
    except CannotExpress as error:
        raise CannotExpress(
            error.message, "Compare the checkpoint with its original instead: gptkit verify ORIGINAL CHECKPOINT"
        ) from error
    with tempfile.TemporaryDirectory(prefix="gptkit-reference-") as parent:
        target = Path(parent) / "hf"
        with Staging(target) as staging:
            files = execute(plan, checkpoint.tensors(), staging)
            staging.commit({}, files=files)
        yield target


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' advice, progress bars and warnings."""
    from transformers import logging

    level = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            logging.enable_progress_bar()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype, inside a `with`.

    transformers' XGLM creates the lowest fp64 number as a tensor of the default dtype, and it is out of range for fp32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def auto_class(config: Mapping[str, Any]) -> Any:
    """Return the transformers auto class for a config.json, such as `AutoModelForCausalLM`."""
    import transformers

    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    if family is not None and family.two_stacks:
        return transformers.AutoModelForSeq2SeqLM
    if family is None or not family.base_class:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel if family.spec(config).head is None else transformers.AutoModelForMaskedLM


def leave_out(model: Any, parts: Iterable[str]) -> list[str]:
    """Remove the submodules `parts`, such as "pooler", from transformers' model, because the files do not have them.

    Return an empty list: the names of the tensors that are still missing.
    """
    for part in parts:
        setattr(model, part, None)
    return []


def load_reference(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    """Load the transformers model in `folder` in eval mode, with this dtype and attention implementation.

    Converting a loaded model with `model.to(dtype)` would round its rotary frequencies too.

    Raises:
        CheckpointError: transformers initialised a tensor at random, or ignored one.
        GptkitError: transformers cannot load the folder.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if (model := own_reference(config, dtype, attention)) is not None:
        stored = {
            name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()
        }
        unexpected = model.load_state_dict(stored, strict=False).unexpected_keys
        missing = [name for name, _ in model.named_parameters() if name not in stored]  # a tied one has one name here
        if missing or unexpected:
            raise CheckpointError(
                f"the weights in {folder.name} lack tensors of transformers' model, or have additional ones: "
                f"{', '.join((missing + unexpected)[:5])}"
            )
        return model.eval()
    import transformers  # noqa: F401 (that it is not installed is no fault of the folder)

    try:
        with quiet():
            model, info = auto_class(config).from_pretrained(
                folder,
                **_class_options(dtype, attention),
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()
        raise GptkitError(f"transformers cannot load {folder.name}: {reason[0] if reason else error!r}") from error
    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    if family is not None and family.two_stacks:  # buffers that files lack are as the class makes them
        own = {leaf.checkpoint for leaf in family.bind(family.spec(config))}
        computed = {*family.computed, *(leaf.checkpoint for leaf in family.leaves if leaf.buffer)} - own
        info["missing_keys"] = [name for name in info["missing_keys"] if name not in computed]
    if family is not None and family.base_class:
        layers = len(family.spec(config).blocks)
        info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not family.carries(name, layers)]
        missing_parts = {name.partition(".")[0] for name in info["missing_keys"]}
        if missing_parts <= {*family.optional}:
            info["missing_keys"] = leave_out(model, missing_parts)
    for kind, problem in (
        ("missing_keys", "initialised tensors at random because they are missing"),
        ("mismatched_keys", "initialised tensors at random because their shapes differ"),
        ("unexpected_keys", "ignored tensors"),
    ):
        if info.get(kind):
            names = ", ".join(str(name) for name in list(info[kind])[:5])
            raise CheckpointError(f"transformers {problem}: {names}")
    _compute_experts_plainly(model)
    begin_anew(model, family)
    # from_pretrained maps parameters at any multiple of 8 bytes, where fp32 products sum in another order than at
    # torch's multiples of 64 (up to 1e-5 in logits). Copies avoid this difference of files, not of models.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


def _class_options(dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """Return the arguments with which transformers builds a model.

    In fp64 they include another implementation of experts, because the default one does not support this dtype.
    """
    experts = "eager" if dtype == torch.float64 else None
    return {"dtype": dtype, "attn_implementation": attention, "experts_implementation": experts}


def own_reference(config: Mapping[str, Any], dtype: torch.dtype, attention: str) -> Any:
    """Return a reference model, without weights, for a model family that transformers does not have.

    The family's definition names the function that builds it (`Architecture.model`). Return None for other families.
    """
    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    if family is None or not family.model:
        return None
    module, _, name = family.model.partition(":")
    with default_dtype(dtype):
        return getattr(import_module(module), name)(config, attention)


def _compute_experts_plainly(model: Any) -> None:
    """Make transformers compute experts one by one if torch's grouped matrix product does not support their sizes.

    It requires rows whose size is a multiple of 16 bytes.
    """
    owners = [module for module in model.modules() if not isinstance(module, nn.Conv1d)]  # their kernels are no experts
    stacked = [parameter for owner in owners for parameter in owner.parameters(recurse=False) if parameter.ndim == 3]
    if any(parameter.shape[dim] * parameter.element_size() % 16 for parameter in stacked for dim in (1, 2)):
        model.set_experts_implementation("eager")


def begin_anew(model: Any, family: Architecture | None) -> None:
    """Make every forward pass of transformers' model independent of previous ones.

    With dynamic rotary scaling, transformers' modules keep the frequencies of the longest sequence so far. If other
    modules of a model family keep state, the family's definition resets it (`Architecture.prepare`).
    """
    if family is not None:
        family.prepare(model)

    def forget(module: Any, prefixes: list[str]) -> None:
        for prefix in prefixes:
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)

    for module in model.modules():
        rope_types = getattr(module, "rope_type", None)
        by_prefix = {"": rope_types}
        if isinstance(rope_types, dict):
            by_prefix = {f"{kind}_": rope_type for kind, rope_type in rope_types.items()}
        dynamic = [prefix for prefix, rope_type in by_prefix.items() if "dynamic" in str(rope_type)]
        if dynamic:
            module.register_forward_pre_hook(lambda module, *_, prefixes=dynamic: forget(module, prefixes))


class _Absent(Tensor):
    """A parameter of a model that runs one layer at a time, while its values are not in memory. Only its shape can be
    used.

    A plain meta tensor would not do, because torch computes some products with it from arbitrary memory. This class
    raises an error instead. Its `device` is the one of the later values, because transformers' Llama 4 moves token ids
    to this device before it calls the embedding.
    """

    full_name: str
    home: torch.device
    device = property(lambda self: self.home)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if not any(isinstance(value, Tensor) for value in tree_leaves(result)):
                return result
        except RuntimeError:  # most operations refuse one themselves
            pass
        name = next(value.full_name for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        raise GptkitError(
            (
                f"--stream: this model uses the weights of {name} without calling that module, so it cannot "
                "be run one layer at a time"
            ),
            "Leave --stream out.",
        )


class StreamedModel:
    """A model in memory, or a model whose layers get their weights only while they compute.

    Args:
        model: the torch module.
        read: returns the values of a parameter by name; None if the model is complete.
        dtype: the dtype of the parameters.
        release: releases the memory that `read` used.
        lent: a layer that also uses the parameters of another module -> the name of that module.
        device: the device of the parameters while they have values.
    """

    def __init__(
        self,
        model: nn.Module,
        read: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        release: Callable[[], None] = lambda: None,
        lent: Mapping[nn.Module, str] | None = None,
        device: torch.device = _CPU,
    ) -> None:
        self.model, self.read, self.dtype, self.release, self.device = model, read, dtype, release, device
        self._spare: dict[tuple[Any, ...], list[Tensor]] = {}
        self._units = units_of(model, lent or {}) if read is not None else []
        for _, owners in self._units:
            self._drop(owners)

    def run(self, batches: Sequence[ProbeBatch]) -> list[Tensor]:
        """Return the logits at tokens without padding, (N, V) per batch."""

        def serve(place: int, brought: list[Any]) -> Generator[Any]:
            owners = self._units[place][1]
            try:
                self._fill(owners)
                yield from brought
            finally:
                self._drop(owners)
                trim_heaps()

        def call(batch: ProbeBatch) -> Tensor:
            return batch.valid(outputs_of(self.model, batch)).cpu()

        stops = (unit.register_forward_pre_hook(lambda *_, n=n: ask(n)) for n, (unit, _) in enumerate(self._units))
        with hooked(stops):
            return run_together(call, batches, serve)

    def _fill(self, owners: Sequence[_Owner]) -> None:
        """Read the weights of one layer or other module. `owners` are its parameters."""
        assert self.read is not None
        with torch.inference_mode(False):
            for module, name, full in owners:
                like = module._parameters[name]
                assert like is not None
                # Reuse the memory of an earlier parameter with this shape, or allocate it in the module's memory order,
                # because GPT-2's products read their weights as [in, out].
                spare = self._spare.get((like.shape, like.stride(), like.dtype), [])
                room: Any = {"dtype": like.dtype, "device": self.device}
                value = spare.pop() if spare else torch.empty_strided(like.shape, like.stride(), **room)
                value.copy_(self.read(full))
                # requires_grad as in a complete model, because torch computes products with it differently.
                module._parameters[name] = nn.Parameter(value, requires_grad=value.is_floating_point())
        self.release()

    def _drop(self, owners: Sequence[_Owner]) -> None:
        """Replace the weights of one layer or other module by parameters without values."""
        for module, name, full in owners:
            value: Any = module._parameters[name]
            if not value.is_meta and value.nbytes <= _KEPT_BYTES:  # tables are too large to keep
                self._spare.setdefault((value.shape, value.stride(), value.dtype), []).append(value.data)
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta").as_subclass(
                _Absent
            )
            empty.full_name, empty.home = full, self.device
            module._parameters[name] = empty  # type: ignore[assignment]


_Owner = tuple[nn.Module, str, str]  # a module, the name of a parameter in it, and its full name in the model


def _owners(module: nn.Module, path: str) -> list[_Owner]:
    """Return, for every parameter of a module: the submodule that has it, its name there, and its full name in the
    model.

    `path` is the name of the module in the model, with a dot at the end.
    """
    names = [name.rpartition(".") for name, _ in module.named_parameters(remove_duplicate=False)]
    return [(module.get_submodule(at), name, f"{path}{at}{dot}{name}") for at, dot, name in names]


def units_of(model: nn.Module, lent: Mapping[nn.Module, str] | None = None) -> list[tuple[nn.Module, list[_Owner]]]:
    """Return the modules whose weights are read and dropped together, each with its parameters.

    These are the layers, and all modules outside of layers that have parameters themselves. If a layer also uses the
    parameters of another module, `lent` has the name of that module: layer -> name.
    """
    units: list[tuple[nn.Module, list[_Owner]]] = []

    def walk(module: nn.Module, path: str, in_list: bool) -> None:
        if not in_list and all(parameter is None for parameter in module._parameters.values()):
            for name, child in module.named_children():
                walk(child, f"{path}{name}.", isinstance(module, nn.ModuleList))
            return
        owners = _owners(module, path)
        if lent and module in lent:
            owners += _owners(model.get_submodule(lent[module]), f"{lent[module]}.")
        units.append((module, owners))

    walk(model, "", False)
    return units


def stream_candidate(tree: Tree, dtype: torch.dtype, attention: Kernel, device: torch.device = _CPU) -> StreamedModel:
    """Return gptkit's decoder for a model. It reads its weights from the files, one layer at a time, onto a device."""
    tied = tree.spec.tied
    with torch.device("meta"):
        model = Decoder(tree.spec, attention).to(dtype).eval()
    if model.head is not None and tied:
        # The head uses the embedding's table; it reads the same values when it runs.
        model.head.weight = nn.Parameter(torch.empty_like(model.embedding.weight), requires_grad=False)
    shared = {"head.weight"} if tied else set()
    if model.encoder is not None and tree.spec.encoder is not None and tree.spec.encoder.embedding.shared:
        model.encoder.embedding.weight = nn.Parameter(torch.empty_like(model.embedding.weight), requires_grad=False)
        shared |= {"encoder.embedding.weight"}

    def read(name: str) -> Tensor:
        return tensor_of(tree, "embedding.weight" if name in shared else name)

    lenders = tree.spec.shared_block_sources.items()
    lent = {model.blocks[layer]: f"blocks.{lender}.shared" for layer, lender in lenders if layer != lender}
    return StreamedModel(model, read, dtype, tree.release, lent, device)


def stream_reference(
    checkpoint: Checkpoint, dtype: torch.dtype, attention: str, device: torch.device = _CPU
) -> StreamedModel:
    """Return transformers' model for a checkpoint. It reads its weights from the files, one layer at a time.

    The weights are read onto `device`, where the buffers are, too.

    Raises CannotExpress if no transformers class computes the model.
    """
    import transformers

    architecture = checkpoint.architecture
    if architecture is None:
        raise CannotExpress(_NO_CLASS)
    original = checkpoint.origin.config
    config = dict(architecture.export_config(checkpoint.spec, original, standard=True) or original or {})
    leaves = {leaf.checkpoint: leaf for leaf in architecture.bind(checkpoint.spec)}
    table = next(leaf for leaf in leaves.values() if leaf.shared == ("embedding.weight",))
    blank = checkpoint.spec.embedding.blank
    with quiet(), _parameters_on_meta():
        model = own_reference(config, dtype, attention)
        if model is None:
            with tempfile.TemporaryDirectory(prefix="gptkit-config-") as folder:
                # transformers reads the config from a file, because JSON files can contain infinity.
                (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
                loaded = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model = auto_class(config).from_config(loaded, **_class_options(dtype, attention))
            leave_out(model, (part for part in architecture.optional if getattr(checkpoint.spec, part) is None))
            _compute_experts_plainly(model)
    begin_anew(model, architecture)
    stacked, repeats = architecture.parameters(checkpoint.spec), architecture.repeats(checkpoint.spec)
    factors = architecture.rescaled(checkpoint.spec)

    def in_files(name: str) -> str:
        begins, built = architecture.modules
        return begins + name.removeprefix(built) if built and name.startswith(built) else name

    def stored(name: str) -> bool:
        return in_files(name) in leaves or in_files(name) in stacked

    # Tables that the class computes itself, such as Marian's sines.
    fixed: dict[str, Tensor] = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if not parameter.is_meta and not stored(name)
    }

    def read(name: str) -> Tensor:
        if name in fixed:
            return fixed[name]
        factor, name = factors.get(name), in_files(name)
        how, parts = stacked.get(name, (None, ()))
        values: Tensor = read_tensor(name) if how is None else how.gather(parts, read_tensor)
        return values if factor is None else values * factor

    def read_tensor(module_name: str) -> Tensor:
        # GPT-NeoX's head is "lm_head" to transformers 5 and has its old name in files.
        module_name = repeats.get(module_name, module_name)
        name = architecture.canonical_name(module_name, leaves, len(checkpoint.spec.blocks)) or module_name
        leaf = table if name == architecture.head and checkpoint.spec.tied else leaves[name]
        parts = [checkpoint.tensor(shared) for shared in leaf.shared]
        values = view_as_torch(leaf.to_checkpoint([array for array, _ in parts]), parts[0][1])
        if leaf is table and blank is not None:  # from_pretrained sets this row to zero
            values = values.clone()
            values[blank] = 0
        return values

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if stored(name):
                buffer.copy_(read(name))
    for module in model.modules():  # not `model.to`, which cannot copy parameters without values
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return StreamedModel(model.eval(), read, dtype, checkpoint.release, device=device)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device inside a `with`, but buffers in memory. This applies to
    the current thread.
    """
    builder = threading.get_ident()

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != builder:
            return None  # the parameter stays unchanged
        if not parameter.requires_grad:  # the class computes it, such as a table of sines and cosines
            return None
        return nn.Parameter(parameter.data.to("meta"), requires_grad=False)

    with hooked([register_module_parameter_registration_hook(on_meta)]):  # type: ignore[arg-type]
        yield


_Watch = Callable[[nn.Module], AbstractContextManager[object]]
"""Returns a context in which hooks on the model's modules are active."""


@dataclass(frozen=True)
class Sides:
    """The two models of a verification.

    They run in memory, or one layer at a time if `folder` is None.
    """

    source: Checkpoint  # the checkpoint that transformers loads (the reference)
    target: Checkpoint  # the checkpoint that gptkit loads (the candidate); it may be the same one
    folder: Path | None  # the folder that transformers loads

    def reference(
        self, batches: Sequence[ProbeBatch], dtype: torch.dtype, path: str, watch: _Watch = nullcontext
    ) -> list[Tensor]:
        """Return transformers' logits at tokens without padding, (N, V) per batch, on the CPU.

        Args:
            batches: the inputs, on the device that computes.
            dtype: the dtype to compute in.
            path: the attention implementation, "sdpa" or "eager".
            watch: called with the torch model. Returns a context, such as one with hooks on the model, and the model
                runs inside it.
        """
        device = device_of_batches(batches)
        if self.folder is None:
            stream = stream_reference(self.source, dtype, path, device)
        else:
            stream = StreamedModel(load_reference(self.folder, dtype, path).to(device))
        with quiet(), default_dtype(torch.promote_types(dtype, torch.float32)), watch(stream.model):
            return stream.run(batches)

    def candidate(
        self,
        batches: Sequence[ProbeBatch],
        dtype: torch.dtype,
        path: Kernel,
        watch: _Watch = nullcontext,
        tree: Tree | None = None,
    ) -> list[Tensor]:
        """Return gptkit's logits at tokens without padding, (N, V) per batch, on the CPU.

        Args:
            batches: the inputs, on the device that computes.
            dtype: the dtype to compute in.
            path: the attention implementation, "sdpa" or "eager".
            watch: called with the torch model. Returns a context, such as one with hooks on the model, and the model
                runs inside it.
            tree: a model to run instead of the target, such as a repaired one.
        """
        device = device_of_batches(batches)
        if self.folder is None:
            stream = stream_candidate(tree or self.target, dtype, path, device)
        elif tree is None:
            stream = StreamedModel(load_checkpoint(self.target, dtype, path, device=device))
        else:
            make = partial(Decoder, tree.spec, path)
            stream = StreamedModel(filled(make, partial(tensor_of, tree), dtype, device=device))
        with watch(stream.model):
            return stream.run(batches)


@contextmanager
def sides(source: Checkpoint, target: Checkpoint, stream: bool) -> Iterator[Sides]:
    """Yield the two models of a verification. A temporary folder for transformers is removed at the end.

    Raises CannotExpress if no transformers class computes the model.
    """
    place: AbstractContextManager[Path | None] = nullcontext() if stream else reference_folder(source)
    with place as folder:
        yield Sides(source, target, folder)

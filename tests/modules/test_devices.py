"""Devices by name: which there are, how missing ones are refused, TF32, and a GPU whose memory is full."""

from typing import Any

import pytest
import torch
import typer.main
from helpers.command import call

import gptkit
from gptkit.cli import app
from gptkit.errors import GptkitError, UsageError
from gptkit.modules import load as loading
from gptkit.modules.devices import device_of, devices_of, in_float32, memory_error

COMMANDS = {
    "load": ["sample:llama"],
    "generate": ["sample:llama", "ROMEO:"],
    "verify": ["sample:llama"],
    "eval": ["sample:llama", "--data", "play.txt"],
    "swap": ["sample:llama", "out", "--norm", "layernorm"],
    "diff": ["sample:llama", "sample:llama"],
    "audit": ["sample:llama"],
    "train": ["sample:llama", "out", "--data", "play.txt", "--tokens", "1k"],
    "heal": ["sample:llama", "out", "--teacher", "sample:llama", "--data", "play.txt"],
    "ablate": ["norms", "out", "--data", "play.txt"],
}
"""Commands with --device, each with arguments that are otherwise right."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that pretends that the machine has this number of GPUs, and that torch has CUDA or not."""

    def pretend(count: int, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")

    return pretend


@pytest.mark.parametrize(
    ("count", "name", "device"),
    [
        *((0, "auto", "cpu"), (0, None, "cpu"), (0, "cpu", "cpu"), (0, "cpu:0", "cpu"), (1, "cpu", "cpu")),
        *((1, "auto", "cuda:0"), (1, None, "cuda:0"), (1, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1")),
        *((2, torch.device("cuda", 1), "cuda:1"), (0, torch.device("cpu"), "cpu")),
    ],
)
def test_names(gpus: Any, count: int, name: Any, device: str) -> None:
    gpus(count)
    assert str(device_of(name)) == device


@pytest.mark.parametrize(
    ("count", "cuda", "name", "said", "hint"),
    [
        (0, None, "cuda", "a build without GPUs", "--device cpu"),
        (0, None, "cuda:1", "device cuda:1 is a GPU", "https://pytorch.org"),
        (0, "13.0", "cuda", "finds none on this machine", "nvidia-smi"),
        (1, "13.0", "cuda:7", "no device cuda:7; the GPUs of this machine are cuda:0", "one of these"),
        (4, "13.0", "cuda:4", "are cuda:0 to cuda:3", "one of these"),
        (1, "13.0", "gpu", "unknown device 'gpu'", "cuda:1 (the second one)"),
        (1, "13.0", "", "unknown device ''", "Use cpu, cuda"),
        (0, None, "cuda:-1", "unknown device", "Use cpu, cuda"),
        (1, "13.0", "cpu,cuda", "on one device, not on several", "one of them"),
        (0, None, "mps", "the GPU of a Mac", "--device auto"),
        (0, None, "meta", "cannot compute on the device 'meta'", "Use cpu, cuda"),
    ],
)
def test_missing_devices(
    gpus: Any, monkeypatch: pytest.MonkeyPatch, count: int, cuda: str | None, name: str, said: str, hint: str
) -> None:
    gpus(count, cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        device_of(name)
    assert said in caught.value.message
    assert hint in str(caught.value.hint)
    assert "\n" not in caught.value.message + str(caught.value.hint)


def test_a_device_without_float64() -> None:
    with pytest.raises(UsageError, match="verify computes in float64, which the device mps does not have"):
        device_of("mps", "verify")


def test_several_devices(gpus: Any) -> None:
    gpus(2)
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    assert devices_of("cuda:0, cuda:1") == devices_of(["cuda:0", two]) == (one, two)
    assert devices_of("cpu") == devices_of(["cpu"]) == (torch.device("cpu"),)
    assert devices_of(None) == devices_of("auto") == (one,)
    with pytest.raises(UsageError, match="no device cuda:5"):
        devices_of("cuda:0,cuda:5")
    with pytest.raises(UsageError, match="the list of devices is empty"):
        devices_of([])


def test_all_commands_declare_one_option() -> None:
    commands: Any = typer.main.get_command(app)
    declared = {
        name: parameter
        for name in commands.list_commands(None)
        for parameter in commands.commands[name].params
        if parameter.name == "device"
    }
    assert set(declared) == {*COMMANDS, "inspect"}
    for parameter in declared.values():
        assert parameter.default == "auto"
        assert "auto, which is a GPU if PyTorch can use one" in parameter.help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_device(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "play.txt").write_text("Now is the winter of our discontent\n" * 400)
    done = call(name, *COMMANDS[name], "--device", "gpu")
    assert done.exit_code == 2, done.stderr
    assert done.stderr.startswith("gptkit: unknown device 'gpu'")
    assert len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_functions_that_take_one_device_refuse_several() -> None:
    for name in ("verify", "swap", "diff", "audit", "train"):
        done = call(name, *COMMANDS[name], "--device", "cpu,cpu")
        assert (done.exit_code, "on one device, not on several" in done.stderr) == (2, True), done.stderr


def test_an_own_implementation_is_compared_on_the_cpu() -> None:
    done = call("verify", "sample:llama", "--against", "port:build", "--device", "cpu")
    assert done.exit_code == 2
    assert "--against cannot be combined with --device" in done.stderr


# --- TF32 -------------------------------------------------------------------------------------------------------------


def _settings() -> list[Any]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


def test_tf32_is_off_inside_and_as_before_outside() -> None:
    for before in ([False, True], [True, True], [False, False]):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
        inside = in_float32()(_settings)
        assert inside() == [False, False]
        with pytest.raises(ZeroDivisionError):
            in_float32()(lambda: 1 / 0)()
        assert _settings() == before
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


def test_tf32_of_newer_settings() -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this release of torch has only the older settings")
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # the older settings now raise an error
        with in_float32():
            assert matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


# --- memory -----------------------------------------------------------------------------------------------------------

FULL = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 10.52 GiB is "
    "free. Including non-PyTorch memory, this process has 68.65 GiB memory in use. Of the allocated memory 67 GiB is "
    "allocated."
)


def test_a_full_gpu(gpus: Any) -> None:
    gpus(1)
    error = memory_error(torch.OutOfMemoryError(FULL), "org/model")
    assert error is not None
    assert error.message == (
        "the memory of cuda:0 (NVIDIA H100 80GB HBM3) is full: PyTorch needs 20.00 GiB more, and 10.52 GiB of "
        "79.19 GiB are free"
    )
    assert error.hint is not None
    assert "gptkit params org/model --gpu 79GB" in error.hint
    assert error.exit_code == 1


def test_a_limit_of_the_process(gpus: Any) -> None:
    gpus(1)
    error = memory_error(RuntimeError(FULL.replace("Of the allocated", "200.00 MiB allowed; Of the allocated")))
    assert error is not None
    assert error.message.endswith("79.19 GiB are free; this process may use 200.00 MiB")


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory",
        "MPS backend out of memory (MPS allocated: 9 GB)",
    ],
)
def test_other_words_for_a_full_gpu(words: str) -> None:
    outer = ValueError("outer")
    outer.__cause__ = RuntimeError(words)
    error = memory_error(outer)
    assert error is not None
    assert error.message == "the memory of the GPU is full"
    assert "gptkit params MODEL --gpu 24GB" in str(error.hint)
    assert memory_error(ValueError("outer")) is None


def test_the_function_and_the_command_say_that_a_gpu_is_full(monkeypatch: pytest.MonkeyPatch, gpus: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(FULL)

    gpus(1)
    monkeypatch.setattr(loading, "allocate", full)
    with pytest.raises(GptkitError, match=r"PyTorch needs 20.00 GiB more") as caught:
        gptkit.load("sample:llama")
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["load"], ["generate", "--ids", "1"], ["eval", "--data", __file__], ["verify"]):
        done = call(words[0], "sample:llama", *words[1:])
        assert done.exit_code == 1, done.stderr
        assert done.stderr.splitlines()[0].startswith("gptkit: the memory of cuda:0")
        assert "gptkit params sample:llama --gpu 79GB" in done.stderr
        assert len(done.stderr.splitlines()) == 2

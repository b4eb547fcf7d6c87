"""Files of a model that are links to files elsewhere: nothing of what those hold is shown."""

import shutil
from pathlib import Path

import pytest
from helpers.command import call
from helpers.covering import few

SAMPLES = Path(__file__).parents[2] / "samples"
FILES = (
    *("latest", "latest_checkpointed_iteration.txt", "config.json", "gptkit.json", "manifest.json", "params.json"),
    *("model_config.yaml", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_config.json", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "meta_000001.json", "hparams.yaml", "train_config.yaml"),
)
"""Small files that some reader opens."""
SECRET = "SECRETHASH"
TEXTS = {
    "long, in lines": f"root:$y$j9T${SECRET}:20228:0:99999:7:::\n" * 8,
    "one line": f"{SECRET}\n",
    "one word of 300 characters": SECRET * 30,
    "a number of 4,000 digits": "9" * 4000 + SECRET,
    "JSON": f'{{"token": "{SECRET}"}}',
}


@few(12)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", FILES)
def test_what_a_link_leads_to_is_not_shown(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(TEXTS[text])
    folder = tmp_path / "model"
    if name.startswith("latest"):
        folder.mkdir()
        shutil.copy(SAMPLES / "llama" / "config.json", folder)
    else:
        shutil.copytree(SAMPLES / "llama", folder)
        if name.endswith("index.json"):
            (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    for command in (["load", folder, "--allow-pickle"], ["check", folder], ["generate", folder, "abc", "-n", "1"]):
        done = call(*command)
        assert SECRET not in done.output and "a bug in gptkit" not in done.output
        assert done.exit_code == 0 or done.stderr.count("\n") <= 2
        if name.startswith("latest") and command[0] == "load":
            assert done.exit_code == 4 and "is a link to a file outside of its folder" in done.stderr


def test_a_snapshot_of_the_hub_links_to_its_blobs(tmp_path: Path) -> None:
    """A run's folder in the hub's cache, whose `latest` names a step that is there."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    (snapshot / "global_step1").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "a").write_text("global_step1")
    (snapshot / "latest").symlink_to("../../blobs/a")
    shutil.copy(SAMPLES / "llama" / "config.json", snapshot)
    done = call("load", snapshot, "--allow-pickle")
    assert "is a link" not in done.stderr and "global_step1" in done.stderr


@pytest.mark.parametrize(("tensor", "pipeline"), [(4095, 4095), (1, 4095), (4095, 1), (2, 1), (1, 2), (2, 3)])
def test_ranks_that_megatron_claims_cost_nothing(tensor: int, pipeline: int) -> None:
    from gptkit.converter.formats.megatron import _stages
    from gptkit.errors import CheckpointError

    claimed = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    file = Path("iter_0000001/mp_rank_00/model_optim_rng.pt")
    with pytest.raises(
        CheckpointError,
        match=(rf"lacks the files of .* {tensor} tensor-parallel x {pipeline} pipeline-parallel " r"ranks"),
    ) as caught:
        _stages(Path("iter_0000001"), [file], [{"args": claimed, "model": {}}], claimed)
    assert len(str(caught.value)) < 300

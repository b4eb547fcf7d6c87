"""Checkpoints that the tests of swaps read, and never write to: each is made once a session."""

from pathlib import Path

import pytest
import torch
from helpers.families import CONFIGS, save_hf


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `exactness.saved` has written."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt2 in bf16."""
    folder = tmp_path_factory.mktemp("gpt2") / "hf"
    save_hf(CONFIGS["gpt2"], folder, torch.bfloat16)
    return folder

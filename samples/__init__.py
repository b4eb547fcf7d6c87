"""The trained checkpoints that ship with gptkit, as data: sample:gpt2, sample:llama, sample:bloom, sample:falcon."""

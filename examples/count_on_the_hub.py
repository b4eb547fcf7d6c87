# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-gptkit"]
# ///
"""Count the parameters of models, without torch.

    uv run examples/count_on_the_hub.py qwen3-8b org/name

A model is a preset of gptkit, a folder, or a Hugging Face id, of which only config.json is downloaded.
"""

import sys

try:
    import hf_gptkit as gptkit
except ImportError:  # the full package has the same functions
    import gptkit

for model in gptkit.params(*sys.argv[1:] or ["gpt2", "qwen3-8b"]):
    print(f"{model.name:40}{model.count.total:>18,}")
    for component, parameters in model.count.by_component.items():
        print(f"  {component:38}{parameters:>18,}")

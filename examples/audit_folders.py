# /// script
# requires-python = ">=3.11"
# dependencies = ["hf-gptkit"]
# ///
"""Audit all checkpoints below a folder, and print what is wrong with them, without torch.

    uv run examples/audit_folders.py runs/

The exit code is 1 if there is an error or a warning.
"""

import sys
from pathlib import Path

try:
    import hf_gptkit as gptkit
except ImportError:  # the full package has the same functions
    import gptkit

dirty = 0
for config in sorted(Path(sys.argv[1] if len(sys.argv) > 1 else ".").rglob("config.json")):
    result = gptkit.audit(config.parent, offline=True)
    dirty += not result.clean
    print(f"{config.parent}: {'right' if result.clean else 'wrong'}")
    for finding in result.findings:
        print(f"  {finding.severity}: {finding.message}")
sys.exit(dirty > 0)

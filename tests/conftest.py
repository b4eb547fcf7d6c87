"""Lets test files import what they share: `from families import VARIANTS` (tests are no package)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

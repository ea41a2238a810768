"""What the tests here share: where the package is, and the smallest comparison."""

from __future__ import annotations

from pathlib import Path

import normplugin

ROOT = Path(normplugin.__file__).resolve().parent.parent
ARGUMENTS = ("--updates", "6", "--threads", "1", "--arms", "normformer_tiny")

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

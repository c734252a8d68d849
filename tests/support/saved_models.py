"""A model of transformers through ``save_pretrained`` and ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def saved_and_loaded(model: Any, folder: Path, **options: Any) -> Any:
    """The model that is loaded from what ``model.save_pretrained`` wrote; no weight of it is new."""
    integration = pytest.importorskip("fp4gemm.integrations.transformers")
    try:
        integration.register()
    except ImportError as error:
        pytest.skip(str(error))
    try:
        model.save_pretrained(folder)
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True, **options)
    finally:
        integration.unregister()
    assert not any(info.values()), info
    return loaded.eval()

"""No restructuring moves a number: the golden record is what the code still gives."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import golden

KEPT = Path(__file__).parent / "golden.json"


@pytest.mark.nights
def test_the_golden_record_is_what_the_code_gives(tmp_path):
    """To the bit on the processor and the JAX that made it; elsewhere to rounding."""
    made = tmp_path / "golden.json"
    subprocess.run([sys.executable, golden.__file__, str(made)], check=True)
    kept, found = json.loads(KEPT.read_text()), json.loads(made.read_text())
    same = all(kept.pop(name) == found.pop(name) for name in ("processor", "jax"))
    assert kept["counts"] == found["counts"]
    if same:
        assert kept == found
    else:
        assert leaves(kept).keys() == leaves(found).keys()
        for path, value in leaves(kept).items():
            if isinstance(value, float):
                np.testing.assert_allclose(leaves(found)[path], value, rtol=1e-5, err_msg=path)


def leaves(tree, path=""):
    """Numbers and texts by their path."""
    if not isinstance(tree, dict | list):
        return {path: tree}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {p: v for name, one in pairs for p, v in leaves(one, f"{path}/{name}").items()}

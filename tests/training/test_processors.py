"""Model bytes that are equal on every processor, as far as one machine can show.

Another process has the code that PyTorch and NumPy take for processors without AVX2.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import applied_updates
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

PROGRAM = Path(applied_updates.__file__)


def test_first_weights_and_outer_steps_have_the_same_bytes_on_a_plain_processor(tmp_path: Path) -> None:
    applied_updates.pack_updates(tmp_path)
    newer = " ".join(name for name in __cpu_dispatch__ if __cpu_features__[name])
    plain = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": newer, "MKL_CBWR": "COMPATIBLE"}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | plain
    ran = subprocess.run([sys.executable, PROGRAM, tmp_path], env=environment, capture_output=True, check=True)
    found = json.loads(ran.stdout)
    assert found.pop("capability") == "DEFAULT"
    assert found == applied_updates.digests(tmp_path)

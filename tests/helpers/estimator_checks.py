"""scikit-learn's own checks of an estimator."""

import json
import os
import subprocess
import sys

from helpers.processes import PATIENCE

CHECKS = """
import json, sys, warnings
from sklearn.utils.estimator_checks import check_estimator
import ksm_lightning.sklearn
outcomes = []
for name, options in json.loads(sys.argv[1]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some checks trigger the warning about a narrow kernel
        results = check_estimator(getattr(ksm_lightning.sklearn, name)(**options), on_skip=None, on_fail=None)
    outcomes.append([(found["check_name"], found["status"], str(found["exception"])) for found in results])
print(json.dumps(outcomes))
"""


def check_all(*estimators: tuple[str, dict[str, object]]) -> None:
    """Run every check in a separate process, with the array API enabled: one check is skipped without it.

    Args:
        estimators: Names of estimators in ``ksm_lightning.sklearn`` and the parameters to check them with.
    """
    environment = {**os.environ, "SCIPY_ARRAY_API": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", CHECKS, json.dumps(estimators)],
        env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    assert len(found) == len(estimators)
    for (name, _), outcomes in zip(estimators, found, strict=True):
        assert [outcome for outcome in outcomes if outcome[1] != "passed"] == []
        assert len(outcomes) > 40
        made = {check for check, *_ in outcomes}
        assert "check_readonly_memmap_input" in made
        assert ("check_transformer_preserve_dtypes" in made) == (name == "KSMTransformer")

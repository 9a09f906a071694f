"""torch's own tests of a backend, run with farwire (or, for comparison, with gloo).

    python crates/farwire-py/tests/torch_suite.py [--backend farwire] [-k PATTERN]

The tests come with torch, in torch.testing._internal.distributed.distributed_test, and need the
packages expecttest and hypothesis. All of them take about half an hour on two cores; tests that
need GPUs are skipped.
"""

import argparse
import os
import sys
import unittest

arguments = argparse.ArgumentParser()
arguments.add_argument("--backend", default="farwire")
arguments.add_argument("--ranks", default="2")
arguments.add_argument("-k", default="*", help="which tests, as a pattern")
chosen = arguments.parse_args()

os.environ["BACKEND"] = chosen.backend
os.environ["WORLD_SIZE"] = chosen.ranks
os.environ.setdefault("TEMP_DIR", "/tmp")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("farwire")
DistTestCases.skip_collective["sendrecv anysource"].add("farwire")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class TestFarwire(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Forked, because starting torch takes longer than a test does.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


if __name__ == "__main__":
    sys.argv[1:] = []
    loader = unittest.TestLoader()
    loader.testNamePatterns = [chosen.k if "*" in chosen.k else f"*{chosen.k}*"]
    tests = loader.loadTestsFromTestCase(TestFarwire)
    result = unittest.TextTestRunner(verbosity=2).run(tests)
    failed = len(result.failures) + len(result.errors)
    skipped = len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(bool(failed))
